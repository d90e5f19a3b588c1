"""The `whet` command line, one module per command."""
