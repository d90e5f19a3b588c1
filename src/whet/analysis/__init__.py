"""Looking into models: precision and routing."""
