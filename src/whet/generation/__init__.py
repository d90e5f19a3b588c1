"""Batched generation with a key/value cache."""
