"""Read a source several times in each pass, or only a random fraction of it."""

from collections.abc import Iterator
from fractions import Fraction

from whet.data.packing import seeded_permutation
from whet.data.sources.readers import digest_text
from whet.data.sources.source import Record, Skipped, Source

_SALT = 3  # of the selection; smaller ones are those of orders


class RepeatedSource:
    """A source whose records come several times in each pass: each one `epochs` times, rounded down or up.

    The records that come once more than others are a random selection, the same in each pass.

    Args:
        source: The source.
        epochs: How often a record comes on average.
        seed: Seed of the selection.
        index: The number of the source in its list, which also affects the selection.
    """

    def __init__(self, source: Source, epochs: float, *, seed: int, index: int = 0) -> None:
        self.name = f"{epochs:g} x {source.name}"
        self.source = source
        self.epochs = epochs
        self.seed = seed
        self.index = index
        self._complete, fraction = divmod(Fraction(str(epochs)), 1)
        self._fraction = fraction

    def with_source(self, source: Source) -> "RepeatedSource":
        """Return the same number of epochs of another source."""
        return RepeatedSource(source, self.epochs, seed=self.seed, index=self.index)

    def __iter__(self) -> Iterator[Record]:
        count = 0
        for repetition in range(self._complete):
            for record in self.source:
                count += repetition == 0
                yield record
        if self._fraction:
            count = count or sum(1 for _ in self.source)
            selected = self._select(count)
            yield from (record for index, record in enumerate(self.source) if index in selected)

    def _select(self, count: int) -> set[int]:
        """Return the indices of the records of the fraction: at least one, so that no source is empty."""
        size = max(1, round(self._fraction * count))
        order = seeded_permutation(count, seed=self.seed, epoch=self.index, salt=_SALT)
        return set(order[:size].tolist())

    @property
    def skipped(self) -> Skipped:
        """The bad records of the source."""
        return self.source.skipped

    def digest(self) -> str:
        """Return the digest of the source, the number of epochs and the selection."""
        selection = f" seed {self.seed} {self.index}" if self._fraction else ""
        return digest_text(f"{self.source.digest()} epochs {self.epochs:g}{selection}")
