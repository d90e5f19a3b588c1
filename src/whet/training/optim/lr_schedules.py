"""Learning-rate schedules: the learning rate as a function of the step."""

import math
from collections.abc import Callable

from whet.config.optim import Optim, ScheduleKind
from whet.errors import ConfigError

Schedule = Callable[[int], float]


def create_schedule(section: Optim, steps: int | None = None) -> Schedule:
    """Return a function from the step, counted from 1, to its learning rate; step 0 is before the first.

    A linear warm-up from 0 is followed by the phases of the schedule. Each phase starts at the final learning
    rate of the previous one and reaches its own final value at its last step. After the last step of the run
    the learning rate is constant. A run that is not longer than its warm-up ends during the warm-up.

    Args:
        section: The section `optim` of a config.
        steps: The number of steps of the run. None if it is unknown, which only some schedules support.

    Raises:
        ConfigError: If the schedule needs `steps`, or its phases do not fit into them.
    """
    if steps is None:
        _require_open_ended(section)
    peak, warmup = section.lr, section.warmup_steps(steps)
    last = math.inf if steps is None else steps
    pieces = _pieces(section, last, warmup=warmup) if last > warmup else []

    def lr_at(step: int) -> float:
        if step < 0:
            raise ConfigError(f"lr_at({step}): steps are counted from 1, and 0 is before the first step")
        if step < warmup:
            return peak * step / warmup
        if not pieces:
            return peak
        done = min(step, last) - warmup
        for piece in pieces:
            if done <= piece.steps:
                break
            done -= piece.steps
        return piece.lr(done)

    return lr_at


class _Piece:
    """One phase of a schedule, with its length and its first and last learning rate."""

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

    def lr(self, done: float) -> float:
        """Return the learning rate after `done` steps of the phase."""
        start, low, progress = self.start, self.low, done / self.steps
        match self.kind:
            case "constant":
                return start
            case "exponential":
                return float(start ** (1 - progress) * low**progress)
            case "step":
                # the first decay_every steps use the initial learning rate of the phase
                decays = max(0, done - 1) // (self.section.decay_every or self.steps)
                return max(start * self.section.decay_factor**decays, min(start, low))
            case "wsd":
                share = min(1.0, (self.steps - done) / self.decay_steps)
            case "cosine":
                share = (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                share = 1 - progress
        return start * share + low * (1 - share)


def _require_open_ended(section: Optim) -> None:
    *earlier, last = (phase.kind for phase in section.phases)
    # wsd decays over a fraction of the run, so it needs the number of steps in any position
    bounded = "wsd" if "wsd" in earlier else last
    if bounded not in ("constant", "step"):
        raise ConfigError(
            f"optim.schedule: {bounded} needs the number of steps", hint="create_schedule(section, steps=N)"
        )


def _pieces(section: Optim, steps: float, *, warmup: int) -> list[_Piece]:
    fixed = warmup + sum(phase.steps or 0 for phase in section.phases)
    if fixed >= steps:
        raise ConfigError(
            f"optim.schedule: warm-up and phases take {fixed} of the run's {steps} steps",
            hint="leave steps for the last phase: shorten the other phases, or make the run longer",
        )
    pieces: list[_Piece] = []
    for phase in section.phases:
        ratio = section.min_lr_ratio if phase.min_lr_ratio is None else phase.min_lr_ratio
        pieces.append(
            _Piece(
                phase.kind,
                section,
                start=pieces[-1].lr(pieces[-1].steps) if pieces else section.lr,
                end=section.lr * ratio,
                steps=phase.steps or steps - fixed,
                decay_steps=section.decay_fraction * steps,
            )
        )
    return pieces
