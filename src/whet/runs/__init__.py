"""Build, train, resume and read one run, inspect its data, and store its teachers' outputs."""
