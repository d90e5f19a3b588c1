"""Cleaning of records: exact and near duplicates, and overlap with evaluation sets."""
