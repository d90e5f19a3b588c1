"""Merge several models or adapters into one model."""
