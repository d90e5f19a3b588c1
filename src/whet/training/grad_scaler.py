"""Loss scaling for fp16: scale the loss before the backward pass so that small gradients do not underflow.

All scales are powers of two, so that scaling and unscaling are exact.
"""

import math
from dataclasses import dataclass

GROWTH_STEPS = 2000  # steps without an overflow before a larger scale is tried
_MAX_SCALE = 2.0**24


@dataclass
class LossScale:
    """The factor of the loss before the backward pass, stored in checkpoints; 1 means no scaling."""

    value: float = 1.0
    good_steps: int = 0

    def shrink_after(self, loss: float) -> bool:
        """Halve the scale after a non-finite gradient; return False if the scale cannot be the cause."""
        if self.value <= 2.0 or not math.isfinite(loss):
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def note_good_step(self) -> None:
        """Count an applied update, and double the scale after GROWTH_STEPS of them."""
        self.good_steps += 1
        if self.value > 1.0 and self.good_steps >= GROWTH_STEPS:
            self.value, self.good_steps = min(self.value * 2, _MAX_SCALE), 0
