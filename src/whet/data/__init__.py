"""Data loading: sources, chat rendering and loss masks, the token store, packing, batches and curricula."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.data.batches import Batch as Batch
    from whet.data.batches import BatchStream as BatchStream
    from whet.data.batches import evaluation_batches as evaluation_batches
    from whet.data.curriculum import difficulty_curriculum as difficulty_curriculum
    from whet.data.curriculum import length_curriculum as length_curriculum
    from whet.data.packing import StepSettings as StepSettings
    from whet.data.sources.source import open_source as open_source
    from whet.data.tokens.prepare_dataset import encode_records as encode_records

_MODULE_OF = {
    "Batch": "data.batches",
    "BatchStream": "data.batches",
    "evaluation_batches": "data.batches",
    "difficulty_curriculum": "data.curriculum",
    "length_curriculum": "data.curriculum",
    "StepSettings": "data.packing",
    "open_source": "data.sources.source",
    "encode_records": "data.tokens.prepare_dataset",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
