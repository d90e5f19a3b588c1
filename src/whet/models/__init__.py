"""The decoder, its layers and families, the transformers bridge, and models trained from scratch."""
