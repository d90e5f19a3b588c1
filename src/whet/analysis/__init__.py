"""What goes on inside a model: activations, attention, and what a probe can read in them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.analysis.attention import attention_maps as attention_maps
    from whet.analysis.capture import ActivationCapture as ActivationCapture
    from whet.analysis.probe import LinearProbe as LinearProbe

_HOME_OF = {"attention_maps": "attention", "ActivationCapture": "capture", "LinearProbe": "probe"}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.analysis.{_HOME_OF[name]}"), name)
