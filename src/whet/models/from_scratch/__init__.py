"""Presets, initialization, muP and tokenizers of models trained from scratch."""
