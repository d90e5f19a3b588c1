"""Learning rates as a function of the step."""

import math
from collections.abc import Callable

from whet.config.sections import Optim

Schedule = Callable[[int], float]


def create_schedule(section: Optim, steps: int) -> Schedule:
    """`lr_at(k)`: the rate of update k, counted from 1; `lr_at(0)` is the value before the first.

    A linear warm-up from 0, then constant, linear or cosine to lr * min_lr_ratio at the last step, and held.
    A run no longer than its warm-up holds at lr once the ramp is over.
    """
    peak, low, warmup = section.lr, section.lr * section.min_lr_ratio, section.warmup

    def lr_at(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        if section.schedule == "constant" or steps <= warmup:
            return peak
        progress = min(1.0, (step - warmup) / (steps - warmup))
        share = 1 - progress if section.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return peak * share + low * (1 - share)

    return lr_at
