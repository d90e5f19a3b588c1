"""Build, train, resume and read one run; inspect its data; ask its teachers."""
