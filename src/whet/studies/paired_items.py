"""Compare two models on the same items of a benchmark task: paired tests, not two separate means."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.studies.statistics import deviation, mean, t_test_p

_RESAMPLES = 2000  # of the bootstrap
_LEVEL = 0.95
_SEED = 0


@dataclass(frozen=True)
class ItemComparison:
    """The scores of two models on the same items; differences are second minus first."""

    items: int
    first: float  # mean over the items that both have
    second: float
    interval: tuple[float, float]  # of the difference: 95%, paired bootstrap over the items
    test: str  # "McNemar" (exact) if all scores are 0 or 1, else "paired t"
    p: float  # two-sided
    only_first: int | None  # McNemar: items that only the first model solved
    only_second: int | None

    @property
    def difference(self) -> float:
        """The difference of the means."""
        return self.second - self.first


def compare_items(first: Mapping[str, float], second: Mapping[str, float]) -> ItemComparison | None:
    """Compare scores by item id, over the items that both have; None if these are fewer than two."""
    shared = [item for item in first if item in second]
    if len(shared) < 2:
        return None
    ours, theirs = [first[item] for item in shared], [second[item] for item in shared]
    interval = bootstrap_interval([b - a for a, b in zip(ours, theirs, strict=True)])
    if all(score in (0.0, 1.0) for score in (*ours, *theirs)):
        only_first = sum(a > b for a, b in zip(ours, theirs, strict=True))
        only_second = sum(a < b for a, b in zip(ours, theirs, strict=True))
        p = mcnemar_p(only_first, only_second)
        return ItemComparison(
            len(shared), mean(ours), mean(theirs), interval, "McNemar", p, only_first, only_second
        )
    p = _paired_t_p([b - a for a, b in zip(ours, theirs, strict=True)])
    return ItemComparison(len(shared), mean(ours), mean(theirs), interval, "paired t", p, None, None)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    If both models are equally good, each item that only one of them solves is a fair coin flip.
    """
    flips = only_first + only_second
    smaller = min(only_first, only_second)
    # logarithms, because the binomial coefficients of many items overflow
    tail = math.fsum(
        math.exp(
            math.lgamma(flips + 1) - math.lgamma(k + 1) - math.lgamma(flips - k + 1) - flips * math.log(2)
        )
        for k in range(smaller + 1)
    )
    return min(1.0, 2 * tail)


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean difference, by resampling the items."""
    values = np.asarray(differences)
    rng = np.random.default_rng(_SEED)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def _paired_t_p(differences: Sequence[float]) -> float:
    average, std = mean(differences), deviation(differences)
    if not std:
        return 0.0 if average else 1.0
    return t_test_p(average / std * math.sqrt(len(differences)), len(differences) - 1)
