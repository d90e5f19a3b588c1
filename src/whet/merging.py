"""Merge adapters into their base model, and several models or adapters into one."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.adapters.merge import merge as merge
    from whet.model_io.merging.adapter_set import AdapterSet as AdapterSet
    from whet.model_io.merging.merge_methods import average as average
    from whet.model_io.merging.merge_methods import dare as dare
    from whet.model_io.merging.merge_methods import dare_ties as dare_ties
    from whet.model_io.merging.merge_methods import slerp as slerp
    from whet.model_io.merging.merge_methods import task_arithmetic as task_arithmetic
    from whet.model_io.merging.merge_methods import ties as ties
    from whet.model_io.merging.merge_models import merge_models as merge_models

_MODULE_OF = {
    "merge": "adapters.merge",
    "AdapterSet": "model_io.merging.adapter_set",
    "merge_models": "model_io.merging.merge_models",
    "average": "model_io.merging.merge_methods",
    "slerp": "model_io.merging.merge_methods",
    "task_arithmetic": "model_io.merging.merge_methods",
    "ties": "model_io.merging.merge_methods",
    "dare": "model_io.merging.merge_methods",
    "dare_ties": "model_io.merging.merge_methods",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
