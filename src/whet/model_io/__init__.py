"""Load, save, convert, merge and export models."""
