"""Text classification, and whet.Classifier."""
