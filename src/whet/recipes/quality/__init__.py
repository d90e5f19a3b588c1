"""The quality-decision task, all of it."""
