"""What `whet data` computes."""
