"""The hot numerics."""
