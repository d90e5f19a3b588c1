"""What is measured and logged during training."""
