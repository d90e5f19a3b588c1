"""Objects by "module:name" strings, and public names, imported on first use: one kind imports no other."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_object(reference: str) -> Any:  # Any: whatever the reference names
    """Import and return what a "module:name" string names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_names(module: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:  # Any: whatever is named
    """Return the __getattr__ of a module whose names are imported from their homes on first use.

    `home_of` maps each name to a module below `whet`, as in {"Callback": "training.callbacks"}.
    """

    def get(name: str) -> Any:  # Any: whatever the name is
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"whet.{home_of[name]}"), name)

    return get


def is_instance_of(value: object, reference: str) -> bool:
    """Return whether a value is an instance of the class "module:name", without importing that module."""
    module, _, name = reference.partition(":")
    loaded = sys.modules.get(module)  # where it is not loaded, nobody can have made an instance
    return loaded is not None and isinstance(value, getattr(loaded, name))
