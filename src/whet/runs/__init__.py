"""Build, train, resume, evaluate and read one run."""
