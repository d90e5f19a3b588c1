"""Text classification: the recipe, the report, and `whet.Classifier`."""
