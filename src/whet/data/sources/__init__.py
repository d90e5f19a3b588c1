"""Readers for training records: files, directories, datasets, Python objects and mixtures of them."""
