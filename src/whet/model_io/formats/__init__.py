"""Adapters and classifier heads in files: PEFT, mlx-lm, and what they have in common."""
