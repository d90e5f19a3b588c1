"""Which way a metric improves."""

_FALLING = ("loss", "perplexity", "bits_per_byte", "cross_entropy", "kl")
_COSTS = ("seconds", "step_s", "eval_s", "elapsed_s", "peak_gib")


def falls(metric: str) -> bool:
    """Whether less of it is better: losses, divergences and costs fall, everything else rises."""
    return metric.endswith(_FALLING) or metric in _COSTS
