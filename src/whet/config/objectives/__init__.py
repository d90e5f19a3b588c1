"""The `objective` section: one module per objective kind, and their union."""
