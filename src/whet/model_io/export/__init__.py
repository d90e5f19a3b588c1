"""Export, and checks of exports."""
