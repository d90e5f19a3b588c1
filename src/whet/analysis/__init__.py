"""Looking into models and their results: precision, routing, classes."""
