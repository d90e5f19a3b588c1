"""Comparison of several runs, as text and as an HTML page."""
