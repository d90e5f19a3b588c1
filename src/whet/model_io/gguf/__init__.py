"""Read and write GGUF files."""
