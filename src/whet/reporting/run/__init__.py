"""The report page of one run."""
