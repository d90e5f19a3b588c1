"""The whet command, one file a command."""
