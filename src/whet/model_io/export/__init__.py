"""Export models for other programs, and check the exports."""
