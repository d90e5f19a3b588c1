"""Which way a metric improves."""


def falls(metric: str) -> bool:
    """Whether less of it is better: losses and perplexities fall, everything else rises."""
    return metric.endswith(("loss", "perplexity"))
