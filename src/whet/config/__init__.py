"""The run configuration: strict sections, read from YAML and written back with every default resolved."""
