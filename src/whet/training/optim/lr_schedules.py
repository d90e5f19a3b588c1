"""Learning rates as a function of the step."""

import math
from collections.abc import Callable

from whet.config.optim import Optim, ScheduleKind
from whet.errors import ConfigError

Schedule = Callable[[int], float]


def create_schedule(section: Optim, steps: int | None = None) -> Schedule:
    """`lr_at(k)`: the rate of update k, counted from 1; `lr_at(0)` is the value before the first.

    A linear warm-up from 0, then the parts of the schedule in a row: each starts at the rate at which the one
    before it ended, and reaches its own end at its last step. After the run's last step its rate is held.
    A run no longer than its warm-up ends on the ramp, which goes on to lr if asked for. Without `steps` there
    is no last step.
    """
    if steps is None:
        _refuse_one_that_ends(section)
    peak, warmup = section.lr, section.warmup
    last = math.inf if steps is None else steps
    pieces = _pieces(section, last) if last > warmup else []

    def lr_at(step: int) -> float:
        if step < 0:
            raise ConfigError(f"lr_at({step}): updates are counted from 1, and 0 is before the first")
        if step < warmup:
            return peak * step / warmup
        if not pieces:
            return peak
        done = min(step, last) - warmup
        for piece in pieces:
            if done <= piece.steps:
                break
            done -= piece.steps
        return piece.rate(done)

    return lr_at


class _Piece:
    """One part with its length and both its ends known."""

    def __init__(
        self,
        kind: ScheduleKind,
        section: Optim,
        *,
        start: float,
        end: float,
        steps: float,
        decay_steps: float,
    ) -> None:
        self.kind = kind
        self.section = section
        self.start = start
        self.low = end
        self.steps = steps
        self.decay_steps = min(decay_steps, steps)

    def rate(self, done: float) -> float:
        """The rate after `done` of the part's steps."""
        start, low, progress = self.start, self.low, done / self.steps
        match self.kind:
            case "constant":
                return start
            case "exponential":
                return float(start ** (1 - progress) * low**progress)
            case "step":
                # the first decay_every updates have the rate at which the part starts
                decays = max(0, done - 1) // (self.section.decay_every or self.steps)
                return max(start * self.section.decay_factor**decays, min(start, low))
            case "wsd":
                share = min(1.0, (self.steps - done) / self.decay_steps)
            case "cosine":
                share = (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                share = 1 - progress
        return start * share + low * (1 - share)


def _refuse_one_that_ends(section: Optim) -> None:
    *earlier, last = (part.kind for part in section.parts)
    bound = "wsd" if "wsd" in earlier else last  # wsd falls over a share of the whole run, wherever it is
    if bound not in ("constant", "step"):
        raise ConfigError(
            f"optim.schedule: {bound} needs the number of steps", hint="create_schedule(section, steps=N)"
        )


def _pieces(section: Optim, steps: float) -> list[_Piece]:
    fixed = section.warmup + sum(part.steps or 0 for part in section.parts)
    if fixed >= steps:
        raise ConfigError(
            f"optim.schedule: warm-up and parts take {fixed} of the run's {steps} steps",
            hint="leave some for the last part: shorten the others, or make the run longer",
        )
    pieces: list[_Piece] = []
    for part in section.parts:
        ratio = section.min_lr_ratio if part.min_lr_ratio is None else part.min_lr_ratio
        pieces.append(
            _Piece(
                part.kind,
                section,
                start=pieces[-1].rate(pieces[-1].steps) if pieces else section.lr,
                end=section.lr * ratio,
                steps=part.steps or steps - fixed,
                decay_steps=section.decay_fraction * steps,
            )
        )
    return pieces
