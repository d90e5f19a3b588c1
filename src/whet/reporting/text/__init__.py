"""Terminal tables and plots of other commands."""
