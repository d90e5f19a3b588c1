"""Experiments: sweeps, comparisons, ablations, muP checks, dtype diagnosis and config advice."""
