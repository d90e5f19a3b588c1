"""Memory, FLOPs, traffic and time before allocation."""
