"""The decoder, its parts and families, the transformers bridge, and models from scratch."""
