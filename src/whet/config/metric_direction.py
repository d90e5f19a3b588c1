"""Which way a metric improves, and what it measures."""

import re
from typing import Literal

_FALLING = re.compile(
    r"(^|_)(loss|perplexity|bits_per_byte|cross_entropy|kl|brier|ece|hamming|truncated_fraction|no_signal_fraction)"
    r"(_\d+)?$"  # of one of several heads
)
_NAMED = re.compile(r"(^|_)(exact_match|reward)_")  # what follows is a name of the user's
_COSTS = ("seconds", "step_s", "eval_s", "elapsed_s", "peak_gib", "reward_errors", "eval_reward_errors")


def falls(metric: str) -> bool:
    """Whether less of it is better: losses, divergences, failures and costs fall, everything else rises."""
    if metric in _COSTS:
        return True
    own = metric.rpartition(".")[2]  # what is before it is the name of a mix's part, or of a split
    return _FALLING.search(own) is not None and _NAMED.search(own) is None


def quantity(metric: str) -> Literal["loss", "tokens", "bits"] | None:
    """What a loss is made of: an objective's own definition, cross-entropy a token, or bits a byte.

    None: it is no loss.
    """
    own = metric.rpartition(".")[2]
    if _NAMED.search(own) is not None:
        return None
    if own.endswith("bits_per_byte"):
        return "bits"
    if re.search(r"(^|_)(perplexity|cross_entropy|main_loss|hard_loss|chosen_loss)$", own):
        return "tokens"
    return "loss" if re.search(r"(^|_)loss(_\d+)?$", own) else None
