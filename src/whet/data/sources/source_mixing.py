"""Several sources as one, by weight."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

from whet.errors import DataError

T = TypeVar("T")

# a pass that has more records than this, and each that is there this often: nobody means that
MOST_RECORDS = 10_000_000
MOST_TIMES = 100


def mix(sources: Sequence[Iterable[T]], weights: Sequence[float]) -> Iterator[T]:
    """Records of several sources, whose shares are as the weights at every point of the stream.

    The next record comes from the source that is furthest behind its share, the first of equals. A source
    that is through begins again; the stream ends when every source has been through once, so that no record
    is left out. A source's count differs from its share by less than the number of sources.
    """
    shares = _whole_shares(weights)
    total = sum(shares)
    readers = [_Around(source) for source in sources]
    taken = [0] * len(readers)
    count = 0
    while not all(reader.been_through for reader in readers):
        count += 1
        behind = [share * count - total * had for share, had in zip(shares, taken, strict=True)]
        chosen = behind.index(max(behind))
        taken[chosen] += 1
        yield readers[chosen].take()


def check_pass(sources: Sequence[Iterable[T]], weights: Sequence[float], names: Sequence[str]) -> None:
    """Refuse weights so far apart that a pass is absurdly long; records are counted only where it may be."""
    shares = _whole_shares(weights)
    total = sum(shares)
    rare = [place for place, share in enumerate(shares) if total > MOST_TIMES * share]
    counts = {place: _count(sources[place]) for place in rare}
    passes = {place: counts[place] * total // shares[place] for place in rare}
    if max(passes.values(), default=0) <= MOST_RECORDS:
        return
    there = sum(counts[place] if place in counts else _count(source) for place, source in enumerate(sources))
    last = max(passes, key=passes.__getitem__)
    if passes[last] > MOST_TIMES * there:
        raise DataError(
            f"a pass over the weighted sources would have {passes[last]:,} records, of {there:,} that are "
            f"there: only then has all of {names[last]} been read",
            hint="choose weights that are closer together",
        )


def _count(source: Iterable[T]) -> int:
    return sum(1 for _ in source)


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportion: sums of floats would depend on rounding."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


class _Around(Generic[T]):
    """A source read over and over, that knows when its last record has been taken."""

    def __init__(self, source: Iterable[T]) -> None:
        self.been_through = False
        self._source = source
        self._records = iter(source)
        self._next = next(self._records)

    def take(self) -> T:
        record = self._next
        try:
            self._next = next(self._records)
        except StopIteration:
            self.been_through = True
            self._records = iter(self._source)
            self._next = next(self._records)
        return record
