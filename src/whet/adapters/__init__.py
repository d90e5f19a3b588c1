"""Low-rank adapters: attach, save, load, merge."""
