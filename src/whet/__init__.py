"""whet sharpens language models."""
