"""Objectives and loss functions. Custom training loops call the functions; runs select them in a config."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

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

_MODULE_OF = {
    "distillation_loss": "objectives.distill",
    "soft_target_loss": "objectives.distill",
    "distrust": "objectives.distrust_loss",
    "GRPOConfig": "objectives.grpo",
    "grpo_loss": "objectives.grpo",
    "MultiTokenPrediction": "objectives.mtp",
    "next_token_loss": "objectives.sft",
    "dpo_loss": "objectives.preference",
    "ipo_loss": "objectives.preference",
    "odds_ratio_loss": "objectives.preference",
    "simpo_loss": "objectives.preference",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
