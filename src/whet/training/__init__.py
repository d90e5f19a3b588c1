"""The training loop, checkpoints and callbacks."""
