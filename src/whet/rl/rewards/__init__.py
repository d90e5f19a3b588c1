"""Reward functions in worker processes."""
