"""Estimate the memory, FLOPs, communication and time of a run before anything is allocated."""
