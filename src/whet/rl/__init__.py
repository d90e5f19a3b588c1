"""Rollouts and rewards. The public names are the built-in rewards and the GRPO loss and advantages."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.objectives.grpo import GRPOConfig as GRPOConfig
    from whet.objectives.grpo import advantages_of as advantages_of
    from whet.objectives.grpo import grpo_loss as grpo_loss
    from whet.rl.rewards.builtin import exact_match as exact_match
    from whet.rl.rewards.builtin import json_schema as json_schema
    from whet.rl.rewards.builtin import length as length
    from whet.rl.rewards.builtin import numeric_match as numeric_match
    from whet.rl.rewards.builtin import regex as regex

_MODULE_OF = {
    "exact_match": "rl.rewards.builtin",
    "numeric_match": "rl.rewards.builtin",
    "regex": "rl.rewards.builtin",
    "json_schema": "rl.rewards.builtin",
    "length": "rl.rewards.builtin",
    "GRPOConfig": "objectives.grpo",
    "advantages_of": "objectives.grpo",
    "grpo_loss": "objectives.grpo",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
