"""Optimizers and learning-rate schedules, and the `optim` config section that creates them."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.config.optim import Optim as Optim
    from whet.training.optim.adafactor import Adafactor as Adafactor
    from whet.training.optim.adamw import AdamW as AdamW
    from whet.training.optim.adamw_8bit import AdamW8bit as AdamW8bit
    from whet.training.optim.lion import Lion as Lion
    from whet.training.optim.lr_schedules import create_schedule as create_schedule
    from whet.training.optim.muon import Muon as Muon
    from whet.training.optim.optimizers import create_optimizer as create_optimizer
    from whet.training.optim.sgd import SGD as SGD

_MODULE_OF = {
    "Optim": "config.optim",
    "create_schedule": "training.optim.lr_schedules",
    "create_optimizer": "training.optim.optimizers",
    "Adafactor": "training.optim.adafactor",
    "AdamW": "training.optim.adamw",
    "AdamW8bit": "training.optim.adamw_8bit",
    "Lion": "training.optim.lion",
    "Muon": "training.optim.muon",
    "SGD": "training.optim.sgd",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
