"""File formats of adapters and classifier heads: PEFT, mlx-lm, and their common stored form."""
