"""Objects passed from Python: data, rewards, metrics, an objective, and their names in a config."""
