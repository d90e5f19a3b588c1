"""Numbers over the steps of a run, out of the rows of its metrics.jsonl."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from whet.runs.run_files import Values

LARGEST = 1e30  # what is beyond cannot be drawn, and says only that something went wrong
_DRAWN = 300  # spans of a longer curve, each drawn as its lowest and its highest point
_SMOOTHED_FROM = 45  # points: fewer need no help
_SPAN = 30  # a smoothed point is mostly made of its neighbours, this part (1/30) of the curve to each side
_NAMES = {"nan", "inf", "-inf"}  # as metrics.jsonl writes what JSON does not have


@dataclass
class Series:
    """One metric: the finite values, how many were not, and the last one, whatever it is."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    left_out: int = 0
    last: float | None = None

    def add(self, step: int, value: float) -> None:
        """The next point."""
        self.last = value
        if math.isfinite(value) and abs(value) <= LARGEST:
            self.steps.append(step)
            self.values.append(value)
        else:
            self.left_out += 1


@dataclass
class Metric:
    """What is known under one name, in training and in evaluations."""

    train: Series = field(default_factory=Series)
    evaluation: Series = field(default_factory=Series)

    @property
    def drawable(self) -> bool:
        """Whether there is any point."""
        return bool(self.train.values or self.evaluation.values)

    @property
    def left_out(self) -> int:
        """Values that are not finite."""
        return self.train.left_out + self.evaluation.left_out


def metrics_of(rows: Iterable[Values]) -> dict[str, Metric]:
    """Every scalar by its name, in the order of their first appearance."""
    found: dict[str, Metric] = {}
    for row in rows:
        evaluated = "eval_s" in row
        for name, value in row.items():
            number = as_number(value)
            if number is not None and name != "step":
                metric = found.setdefault(name, Metric())
                (metric.evaluation if evaluated else metric.train).add(row["step"], number)
    return found


def as_number(value: object) -> float | None:
    """A number as metrics.jsonl has them; None for everything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float) or (isinstance(value, str) and value in _NAMES):
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits
            return math.inf
    return None


def smoothed(values: Sequence[float]) -> list[float] | None:
    """A mean that fades exponentially to both sides, so that it does not lag; None for a short curve."""
    if len(values) < _SMOOTHED_FROM:
        return None
    keep = 1 - 2 / (len(values) / _SPAN + 1)
    before, after = _faded(values, keep), _faded(values[::-1], keep)[::-1]
    return [
        (left - value + right) / (left_weight - 1 + right_weight)  # the point itself is in both
        for value, (left, left_weight), (right, right_weight) in zip(values, before, after, strict=True)
    ]


def _faded(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """For each point, the sum of it and all before, each weighted by its distance, and the weights' sum."""
    total, weight, found = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append((total, weight))
    return found


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """No more points than a screen shows, with every peak: a page of a long run stays small."""
    count = len(values)
    if count <= 2 * _DRAWN:
        return list(steps), list(values)
    kept: list[int] = []
    for start, end in pairwise(round(count * part / _DRAWN) for part in range(_DRAWN + 1)):
        places = range(start, end)
        ends = {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
        kept += sorted({*ends, *({0} if start == 0 else ()), *({count - 1} if end == count else ())})
    return [steps[place] for place in kept], [values[place] for place in kept]
