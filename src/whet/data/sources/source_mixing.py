"""Mix several sources by weight."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

import numpy as np

from whet.config.data import Weight
from whet.errors import DataError

T = TypeVar("T")

# weights are rejected if a pass exceeds both limits: its number of records, and repetitions per record
MAX_PASS_RECORDS = 10_000_000
MAX_REPEATS = 100


def mix(sources: Sequence[Iterable[T]], weights: Sequence[float]) -> Iterator[T]:
    """Yield records of several sources in the proportion of their weights, at every point of the stream.

    The next record comes from the source that is furthest behind its share; ties go to the first source. An
    exhausted source restarts. The stream ends once every source was read completely, so no record is left
    out. The count of each source deviates from its share by less than the number of sources.
    """
    shares = _integer_shares(weights)
    total = sum(shares)
    readers = [_CyclingReader(source) for source in sources]
    counts = [0] * len(readers)
    count = 0
    while not all(reader.completed_pass for reader in readers):
        count += 1
        behind = [share * count - total * drawn for share, drawn in zip(shares, counts, strict=True)]
        chosen = behind.index(max(behind))
        counts[chosen] += 1
        yield readers[chosen].next_record()


def weight_at(weight: Weight, step: int, *, total_steps: int) -> float:
    """Return a weight at a step, counted from 0: between two steps of a schedule, it changes linearly.

    Args:
        weight: A number, or a mapping of steps, or fractions of the run below 1, to numbers.
        step: The step.
        total_steps: The steps of the run.
    """
    if isinstance(weight, int | float):
        return float(weight)
    points = sorted((at if at >= 1 else at * total_steps, value) for at, value in weight.items())
    steps, values = zip(*points, strict=True)
    return float(np.interp(step, steps, values))


def check_pass(sources: Sequence[Iterable[T]], weights: Sequence[float], names: Sequence[str]) -> None:
    """Raise an error for weights so far apart that a pass would be extremely long.

    Records are counted only if some weight is small enough for that.
    """
    shares = _integer_shares(weights)
    total = sum(shares)
    rare = [index for index, share in enumerate(shares) if total > MAX_REPEATS * share]
    counts = {index: _count(sources[index]) for index in rare}
    passes = {index: counts[index] * total // shares[index] for index in rare}
    if max(passes.values(), default=0) <= MAX_PASS_RECORDS:
        return
    available = sum(
        counts[index] if index in counts else _count(source) for index, source in enumerate(sources)
    )
    slowest = max(passes, key=passes.__getitem__)
    if passes[slowest] > MAX_REPEATS * available:
        raise DataError(
            f"a pass over the weighted sources would yield {passes[slowest]:,} records from {available:,} "
            f"distinct ones before all of {names[slowest]} has been read",
            hint="choose weights that are closer together",
        )


def _count(source: Iterable[T]) -> int:
    return sum(1 for _ in source)


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Return integers in the same proportion as the weights: sums of floats would depend on rounding."""
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * denominator) for weight in exact]


class _CyclingReader(Generic[T]):
    """Read a source repeatedly, and record when its last record has been returned."""

    def __init__(self, source: Iterable[T]) -> None:
        self.completed_pass = False
        self._source = source
        self._records = iter(source)
        self._next = next(self._records)

    def next_record(self) -> T:
        record = self._next
        try:
            self._next = next(self._records)
        except StopIteration:
            self.completed_pass = True
            self._records = iter(self._source)
            self._next = next(self._records)
        return record
