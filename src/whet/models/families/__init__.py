"""One small file a family: config.json to and from ModelSpec."""
