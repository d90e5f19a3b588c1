"""Records, rendering and masks, the token store, packing, batches and curricula."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.data.curriculum import difficulty_curriculum as difficulty_curriculum
    from whet.data.curriculum import length_curriculum as length_curriculum

_HOME_OF = {"difficulty_curriculum": "curriculum", "length_curriculum": "curriculum"}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.data.{_HOME_OF[name]}"), name)
