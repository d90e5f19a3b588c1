"""Text tables and plots of the commands other than data, report and compare."""
