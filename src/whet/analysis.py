"""Model analysis: activations, attention maps and linear probes."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.evaluation.linear_probe import LinearProbe as LinearProbe
    from whet.training.observe.activation_capture import ActivationCapture as ActivationCapture
    from whet.training.observe.attention_maps import attention_maps as attention_maps

_MODULE_OF = {
    "attention_maps": "training.observe.attention_maps",
    "ActivationCapture": "training.observe.activation_capture",
    "LinearProbe": "evaluation.linear_probe",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
