"""Run generated code in a separate process with limits."""
