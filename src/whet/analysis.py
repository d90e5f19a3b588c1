"""What goes on inside a model: activations, attention, and what a probe can read in them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.evaluation.linear_probe import LinearProbe as LinearProbe
    from whet.training.observe.activation_capture import ActivationCapture as ActivationCapture
    from whet.training.observe.attention_maps import attention_maps as attention_maps

_HOME_OF = {
    "attention_maps": "training.observe.attention_maps",
    "ActivationCapture": "training.observe.activation_capture",
    "LinearProbe": "evaluation.linear_probe",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.{_HOME_OF[name]}"), name)
