"""Metric curves over the steps of a run, read from the rows of its metrics.jsonl."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from whet.runs.run_files import JsonObject

MAX_PLOTTED_VALUE = 1e30  # larger values cannot be plotted, and only show that training diverged
_MAX_SPANS = 300  # longer curves are drawn as the minimum and maximum of this many spans
_MIN_POINTS_TO_SMOOTH = 45
_SMOOTHING_FRACTION = 30  # a smoothed point averages mostly over 1/30 of the curve on each side
_NONFINITE_NAMES = {"nan", "inf", "-inf"}  # how metrics.jsonl writes values that JSON does not support


@dataclass
class Series:
    """One curve: its finite values, the number of non-finite ones, and the last value, finite or not."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    omitted_points: int = 0
    last: float | None = None

    def add(self, step: int, value: float) -> None:
        """Append a point, or count it in `omitted_points` if it is not finite or too large to plot."""
        self.last = value
        if math.isfinite(value) and abs(value) <= MAX_PLOTTED_VALUE:
            self.steps.append(step)
            self.values.append(value)
        else:
            self.omitted_points += 1


@dataclass
class Metric:
    """The training curve and the evaluation curve of one metric."""

    train: Series = field(default_factory=Series)
    evaluation: Series = field(default_factory=Series)

    @property
    def has_points(self) -> bool:
        """Whether there is at least one point to plot."""
        return bool(self.train.values or self.evaluation.values)

    @property
    def omitted_points(self) -> int:
        """The number of points that cannot be plotted."""
        return self.train.omitted_points + self.evaluation.omitted_points


def metrics_by_name(rows: Iterable[JsonObject]) -> dict[str, Metric]:
    """Return every scalar metric by name, in the order of first appearance in the rows."""
    metrics: dict[str, Metric] = {}
    for row in rows:
        evaluated = "eval_s" in row
        for name, value in row.items():
            number = as_number(value)
            if number is not None and name != "step":
                metric = metrics.setdefault(name, Metric())
                (metric.evaluation if evaluated else metric.train).add(row["step"], number)
    return metrics


def as_number(value: object) -> float | None:
    """Return a value of metrics.jsonl as a float, or None if it is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float) or (isinstance(value, str) and value in _NONFINITE_NAMES):
        try:
            return float(value)
        except OverflowError:  # an integer with hundreds of digits
            return math.inf
    return None


def smooth(values: Sequence[float]) -> list[float] | None:
    """Return the two-sided exponential moving average, which does not lag, or None for a short curve."""
    if len(values) < _MIN_POINTS_TO_SMOOTH:
        return None
    decay = 1 - 2 / (len(values) / _SMOOTHING_FRACTION + 1)
    before, after = _decayed_sums(values, decay), _decayed_sums(values[::-1], decay)[::-1]
    return [
        (left - value + right) / (left_weight - 1 + right_weight)  # both sums contain the point itself
        for value, (left, left_weight), (right, right_weight) in zip(values, before, after, strict=True)
    ]


def _decayed_sums(values: Sequence[float], decay: float) -> list[tuple[float, float]]:
    """Return, per point, the exponentially decayed sum up to and including it, and the sum of the weights."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        sums.append((total, weight))
    return sums


def downsample(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the curve with at most a few points per pixel, and with all of its peaks.

    Each of `_MAX_SPANS` spans is reduced to its minimum and its maximum, to keep the report page of a long
    run small. The first and the last point are always included.
    """
    count = len(values)
    if count <= 2 * _MAX_SPANS:
        return list(steps), list(values)
    selected: list[int] = []
    for start, end in pairwise(round(count * span / _MAX_SPANS) for span in range(_MAX_SPANS + 1)):
        indices = range(start, end)
        extremes = {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
        selected += sorted({*extremes, *({0} if start == 0 else ()), *({count - 1} if end == count else ())})
    return [steps[i] for i in selected], [values[i] for i in selected]
