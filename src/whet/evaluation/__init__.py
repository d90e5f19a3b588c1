"""`whet eval`, and metrics of generated answers and classifiers."""
