"""What `whet data` shows."""
