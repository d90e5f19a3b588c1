"""Checks of a config, and messages about what is wrong with it."""
