"""Which way a metric improves."""

import re

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
