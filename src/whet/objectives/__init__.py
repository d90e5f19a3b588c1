"""What is optimised. These functions are for loops of one's own; runs name an objective in their config."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.objectives.distill import distillation_loss as distillation_loss
    from whet.objectives.distill import soft_target_loss as soft_target_loss
    from whet.objectives.distrust_loss import distrust as distrust
    from whet.objectives.grpo import GRPOConfig as GRPOConfig
    from whet.objectives.grpo import grpo_loss as grpo_loss
    from whet.objectives.mtp import MultiTokenPrediction as MultiTokenPrediction
    from whet.objectives.preference import dpo_loss as dpo_loss
    from whet.objectives.preference import ipo_loss as ipo_loss
    from whet.objectives.preference import odds_ratio_loss as odds_ratio_loss
    from whet.objectives.preference import simpo_loss as simpo_loss
    from whet.objectives.sft import next_token_loss as next_token_loss

_HOME_OF = {
    "distillation_loss": "distill",
    "soft_target_loss": "distill",
    "distrust": "distrust_loss",
    "GRPOConfig": "grpo",
    "grpo_loss": "grpo",
    "MultiTokenPrediction": "mtp",
    "next_token_loss": "sft",
    "dpo_loss": "preference",
    "ipo_loss": "preference",
    "odds_ratio_loss": "preference",
    "simpo_loss": "preference",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet.objectives' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.objectives.{_HOME_OF[name]}"), name)
