"""Objects named by "module:name" strings: registries hold them, so that one kind imports no other."""

import importlib
import sys
from typing import Any


def load_object(reference: str) -> Any:  # Any: whatever the reference names
    """Import and return what a "module:name" string names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def is_instance_of(value: object, reference: str) -> bool:
    """Return whether a value is an instance of the class "module:name", without importing that module."""
    module, _, name = reference.partition(":")
    loaded = sys.modules.get(module)  # where it is not loaded, nobody can have made an instance
    return loaded is not None and isinstance(value, getattr(loaded, name))
