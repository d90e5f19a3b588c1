"""Several sources as one, by weight."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

T = TypeVar("T")


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
