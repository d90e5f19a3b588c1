"""Built-in reward functions, and the worker processes that run rewards."""
