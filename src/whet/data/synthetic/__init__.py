"""Synthetic records (`synth:NAME`)."""
