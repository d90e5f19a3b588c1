"""Optimizers, parameter groups, schedules."""
