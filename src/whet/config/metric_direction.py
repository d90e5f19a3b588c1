"""The direction in which a metric improves, and the quantity it measures."""

import re
from typing import Literal

_LOWER_IS_BETTER = re.compile(
    r"(^|_)(loss|perplexity|bits_per_byte|cross_entropy|kl|brier|ece|hamming|truncated_fraction|no_signal_fraction)"
    r"(_\d+)?$"  # the index of a prediction head
)
_USER_NAMED = re.compile(r"(^|_)(exact_match|reward)_")  # followed by a name that the user chose
_COSTS = ("seconds", "step_s", "eval_s", "elapsed_s", "peak_gib", "reward_errors", "eval_reward_errors")


def lower_is_better(metric: str) -> bool:
    """Return whether lower is better, as for losses, divergences, failures and costs."""
    if metric in _COSTS:
        return True
    name = metric.rpartition(".")[2]  # without the prefix of a mix part or a split
    return _LOWER_IS_BETTER.search(name) is not None and _USER_NAMED.search(name) is None


def loss_quantity(metric: str) -> Literal["loss", "tokens", "bits"] | None:
    """Return which quantity a loss metric measures, or None if the metric is not a loss.

    "loss" is defined by the objective, "tokens" is cross-entropy per token (or its exponential), and "bits"
    is bits per byte. Only metrics of the same quantity can be compared.
    """
    name = metric.rpartition(".")[2]
    if _USER_NAMED.search(name) is not None:
        return None
    if name.endswith("bits_per_byte"):
        return "bits"
    if re.search(r"(^|_)(perplexity|cross_entropy|main_loss|hard_loss|chosen_loss)$", name):
        return "tokens"
    return "loss" if re.search(r"(^|_)loss(_\d+)?$", name) else None
