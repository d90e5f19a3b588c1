"""Several models or adapters into one."""
