"""Objects passed from Python (data, rewards, metrics, an objective) and their placeholders in a config."""
