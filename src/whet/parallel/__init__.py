"""Training on several processes: process groups, FSDP2, tensor parallelism, gradient synchronization."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.parallel.gradient_sync import flat_gradients as flat_gradients
    from whet.parallel.gradient_sync import set_flat_gradients as set_flat_gradients

_MODULE_OF = {"flat_gradients": "parallel.gradient_sync", "set_flat_gradients": "parallel.gradient_sync"}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
