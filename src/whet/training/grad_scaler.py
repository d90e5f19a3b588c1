"""Loss scaling: fp16 gradients are made larger, so that small ones do not vanish, and smaller again in time.

All scales are powers of two: multiplying by one and dividing by it again changes no bit.
"""

import math
from dataclasses import dataclass

GROWTH_STEPS = 2000  # steps without an overflow before a larger scale is tried
_LARGEST = 2.0**24


@dataclass
class LossScale:
    """What the loss is multiplied with before the backward pass; part of a run's state. 1: no scaling."""

    value: float = 1.0
    good_steps: int = 0

    def shrink_after(self, loss: float) -> bool:
        """After a gradient that is not finite: True where the scale may be to blame, and is smaller now."""
        if self.value <= 2.0 or not math.isfinite(loss):
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def note_good_step(self) -> None:
        """After an update: once in a while, try a larger scale."""
        self.good_steps += 1
        if self.value > 1.0 and self.good_steps >= GROWTH_STEPS:
            self.value, self.good_steps = min(self.value * 2, _LARGEST), 0
