"""Config validation and its error messages."""
