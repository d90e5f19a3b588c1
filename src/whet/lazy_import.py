"""Import objects on first use, by "module:name" references or as lazy attributes of a module."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_object(reference: str) -> Any:  # Any: the referenced object
    """Import and return the object of a "module:name" reference."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_getattr(module: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:  # Any: the named object
    """Return a module-level `__getattr__` that imports public names on first use.

    Args:
        module: The name of the module, for error messages.
        module_of: The module below `whet` that defines each name, as in {"Callback": "training.callbacks"}.
    """

    def get(name: str) -> Any:  # Any: the named object
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"whet.{module_of[name]}"), name)

    return get


def is_instance_of(value: object, reference: str) -> bool:
    """Return whether a value is an instance of the class "module:name", without importing its module."""
    module, _, name = reference.partition(":")
    loaded = sys.modules.get(module)  # if it is not loaded, there are no instances
    return loaded is not None and isinstance(value, getattr(loaded, name))
