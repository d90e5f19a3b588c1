"""GGUF in and out."""
