"""Training on several workers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.parallel.gradient_sync import flat_gradients as flat_gradients
    from whet.parallel.gradient_sync import set_flat_gradients as set_flat_gradients

_HOME_OF = {"flat_gradients": "gradient_sync", "set_flat_gradients": "gradient_sync"}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.parallel.{_HOME_OF[name]}"), name)
