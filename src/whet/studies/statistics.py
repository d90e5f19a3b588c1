"""Paired t-tests, effect sizes and confidence intervals for metrics over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Comparison:
    """The comparison of two arms over the same seeds; differences are first minus second."""

    first: str
    second: str
    difference: float  # mean
    effect_size: float  # Cohen's d for paired samples (d_z): mean difference / its standard deviation
    t: float
    p: float  # paired t-test, two-sided
    p_adjusted: float  # Holm's correction over all comparisons

    def differs(self) -> bool:
        """Return whether the difference is significant at the 5% level."""
        return self.p_adjusted < 0.05


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1)."""
    average = mean(values)
    return math.sqrt(math.fsum((value - average) ** 2 for value in values) / (len(values) - 1))


def compare(series: Mapping[str, Sequence[float]]) -> list[Comparison]:
    """Compare every pair of arms with a paired t-test; p-values are corrected for the number of pairs."""
    tests = []
    for first, second in combinations(series, 2):
        differences = [a - b for a, b in zip(series[first], series[second], strict=True)]
        average, std = mean(differences), deviation(differences)
        constant_effect = math.copysign(math.inf, average) if average else 0.0  # equal for every seed
        effect = average / std if std else constant_effect
        t = effect * math.sqrt(len(differences))
        tests.append((first, second, average, effect, t, t_test_p(t, len(differences) - 1)))
    adjusted = holm([test[-1] for test in tests])
    return [Comparison(*test, p_adjusted=p) for test, p in zip(tests, adjusted, strict=True)]


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of the mean (Student's t), or None for a single value."""
    if len(values) < 2:
        return None
    half_width = _t_quantile(1 - level, len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return mean(values) - half_width, mean(values) + half_width


def hedges_g(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the difference of two means in pooled standard deviations, corrected for small samples.

    Hedges (1981). None if there are too few values to estimate the standard deviation.
    """
    degrees_of_freedom = len(first) + len(second) - 2
    if degrees_of_freedom < 2:
        return None
    squares = sum((len(side) - 1) * deviation(side) ** 2 for side in (first, second) if len(side) > 1)
    difference = mean(first) - mean(second)
    if not squares:
        return math.copysign(math.inf, difference) if difference else 0.0
    half = degrees_of_freedom / 2
    correction = math.exp(math.lgamma(half) - math.lgamma(half - 0.5)) / math.sqrt(half)
    return correction * difference / math.sqrt(squares / degrees_of_freedom)


def _t_quantile(p: float, degrees_of_freedom: int) -> float:
    """Return the t with a given two-sided p-value."""
    low, high = 0.0, 1.0
    while t_test_p(high, degrees_of_freedom) > p:
        low, high = high, 2 * high
    for _ in range(80):  # bisection, exact to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if t_test_p(middle, degrees_of_freedom) > p else (low, middle)
    return high


def t_test_p(t: float, degrees_of_freedom: int) -> float:
    """Return the two-sided p-value of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees_of_freedom))
    cosine = math.cos(angle)
    term = cosine if degrees_of_freedom % 2 else 1.0
    total = term if degrees_of_freedom > 1 else 0.0
    for power in range(3 if degrees_of_freedom % 2 else 2, degrees_of_freedom - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    probability = math.sin(angle) * total
    if degrees_of_freedom % 2:
        probability = 2 / math.pi * (angle + probability)
    return max(0.0, 1.0 - probability)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted
