"""Adapted layers."""
