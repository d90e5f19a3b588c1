"""What is trained: descriptions, the decoder, families, weights."""
