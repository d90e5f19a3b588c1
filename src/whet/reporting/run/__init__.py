"""The report of a run, and the list of runs."""
