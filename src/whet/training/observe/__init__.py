"""Measurements and logging during training."""
