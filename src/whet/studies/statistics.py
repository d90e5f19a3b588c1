"""Whether two series of paired numbers differ: by how much, and how surely."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Comparison:
    """Two arms over the same seeds; differences are first minus second."""

    first: str
    second: str
    difference: float  # mean
    effect_size: float  # Cohen's d of paired numbers (d_z): mean difference / its standard deviation
    t: float
    p: float  # paired t-test, two-sided
    p_adjusted: float  # by Holm, for all comparisons made

    def differs(self) -> bool:
        """Whether the arms can be told apart."""
        return self.p_adjusted < 0.05


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample (n - 1)."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def compare(series: Mapping[str, Sequence[float]]) -> list[Comparison]:
    """Every pair of arms, with p-values corrected for how many pairs there are."""
    found = []
    for first, second in combinations(series, 2):
        apart = [a - b for a, b in zip(series[first], series[second], strict=True)]
        middle, spread = mean(apart), deviation(apart)
        certain = math.copysign(math.inf, middle) if middle else 0.0  # the same in every seed
        effect = middle / spread if spread else certain
        t = effect * math.sqrt(len(apart))
        found.append((first, second, middle, effect, t, t_test_p(t, len(apart) - 1)))
    adjusted = holm([comparison[-1] for comparison in found])
    return [Comparison(*each, p_adjusted=p) for each, p in zip(found, adjusted, strict=True)]


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The confidence interval of the mean, by Student's t; None of a single number."""
    if len(values) < 2:
        return None
    half = _t_beyond(1 - level, len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def hedges_g(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The difference of two means in pooled standard deviations, corrected for small samples (Hedges 1981).

    None where there are too few numbers to know a spread.
    """
    freedom = len(first) + len(second) - 2
    if freedom < 2:
        return None
    squares = sum((len(side) - 1) * deviation(side) ** 2 for side in (first, second) if len(side) > 1)
    apart = mean(first) - mean(second)
    if not squares:
        return math.copysign(math.inf, apart) if apart else 0.0
    half = freedom / 2
    correction = math.exp(math.lgamma(half) - math.lgamma(half - 0.5)) / math.sqrt(half)
    return correction * apart / math.sqrt(squares / freedom)


def _t_beyond(p: float, freedom: int) -> float:
    """The t whose two-sided p-value this is."""
    low, high = 0.0, 1.0
    while t_test_p(high, freedom) > p:
        low, high = high, 2 * high
    for _ in range(80):  # halving: exact to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if t_test_p(middle, freedom) > p else (low, middle)
    return high


def t_test_p(t: float, freedom: int) -> float:
    """The two-sided p of Student's t, by its finite series (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    inside = math.sin(angle) * total
    if freedom % 2:
        inside = 2 / math.pi * (angle + inside)
    return max(0.0, 1.0 - inside)


def holm(values: Sequence[float]) -> list[float]:
    """p-values of a family, adjusted by Holm's step-down rule."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted
