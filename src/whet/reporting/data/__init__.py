"""The output of `whet data`, as text and as an HTML page."""
