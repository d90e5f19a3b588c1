"""Chat templates: rendering in a sandbox with limits, probing, and finding turns in the rendered text."""
