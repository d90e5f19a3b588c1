"""What a run is: strict sections, YAML in, resolved YAML out."""
