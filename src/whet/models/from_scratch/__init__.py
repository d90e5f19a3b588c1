"""Models trained from scratch."""
