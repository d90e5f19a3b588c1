"""Which way a metric improves."""

import re

_FALLING = (
    *("loss", "perplexity", "bits_per_byte", "cross_entropy", "kl", "brier", "ece", "hamming"),
    *("errors", "truncated_fraction", "no_signal_fraction"),
)
_COSTS = ("seconds", "step_s", "eval_s", "elapsed_s", "peak_gib")


def falls(metric: str) -> bool:
    """Whether less of it is better: losses, divergences, failures and costs fall, everything else rises."""
    name = re.sub(r"_\d+$", "", metric)  # of one of several heads
    return name.endswith(_FALLING) or metric in _COSTS
