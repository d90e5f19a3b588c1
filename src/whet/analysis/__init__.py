"""What models and their results are like."""
