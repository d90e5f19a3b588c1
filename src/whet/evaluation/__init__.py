"""`whet eval`, metrics of answers and classifiers."""
