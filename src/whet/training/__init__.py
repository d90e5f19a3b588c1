"""The trainer and what a run needs to go on."""
