"""Read records without end: pass after pass over shuffled shards, mixed by weight, from any position."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.config.data import Weight
from whet.data.packing import seeded_permutation
from whet.data.sources.readers import Position, Shard, SourceRow, digest_text
from whet.data.sources.source import CombinedSource, Record, SingleSource, Skipped, Source
from whet.data.sources.source_mixing import weight_at
from whet.errors import ConfigError, DataError

StreamState = dict[str, Any]  # Any: JSON values
_SALT = 2  # of the order of shards; 0 and 1 are those of examples and steps


class PassReader:
    """Reads the shards of some sources again and again, each pass in another order.

    Args:
        sources: The sources, whose shards are read together.
        seed: Seed of the order of the shards; None to keep their order.
        salt: Distinguishes the readers of one stream.
    """

    def __init__(self, sources: Sequence[SingleSource], *, seed: int | None, salt: int = 0) -> None:
        self.name = " + ".join(source.name for source in sources)
        self._shards: list[tuple[SingleSource, Shard]] = [
            (source, shard) for source in sources for shard in source.shards()
        ]
        self._seed = seed
        self._salt = _SALT + salt
        self.number = 0  # of the pass, from 0
        self._shard = 0  # in the order of this pass
        self._position: Position = ()
        self._rows: Iterator[tuple[SourceRow, Position]] | None = None
        self._ordered: tuple[int, list[int]] | None = None  # a pass and its order of shards
        self._bad = Skipped()  # of this pass
        self._has_records = False  # whether this pass, or the part before a resume, has a usable record

    def state(self) -> StreamState:
        """Return the position: the pass, the shard in its order, and the position in the shard."""
        return {"pass": self.number, "shard": self._shard, "position": list(self._position)}

    def seek(self, state: StreamState) -> None:
        """Continue from a position that `state` returned. An open shard stays open if it is already there."""
        if state == self.state():
            return
        self.close()
        self.number, self._shard = state["pass"], state["shard"]
        self._position = tuple(state["position"])
        self._has_records = True

    def close(self) -> None:
        """Close the open shard."""
        if self._rows is not None:
            self._rows.close()  # type: ignore[attr-defined]  # the rows of a shard are a generator
            self._rows = None

    def next_record(self) -> Record | DataError | None:
        """Return the next record, or the error of a bad one; None once at the end of each pass."""
        while True:
            source, shard = self._shards[self._order[self._shard]]
            if self._rows is None:
                self._rows = shard.rows(self._position)
            item = next(self._rows, None)
            if item is not None:
                row, self._position = item
                record = source.to_record(row)
                if isinstance(record, DataError):
                    self._bad.add(record)
                else:
                    self._has_records = True
                return record
            self.close()
            self._shard, self._position = self._shard + 1, ()
            if self._shard == len(self._shards):
                self._end_pass()
                return None

    @property
    def _order(self) -> Sequence[int]:
        """The order of the shards in this pass."""
        if self._ordered is None or self._ordered[0] != self.number:
            count, seed = len(self._shards), self._seed
            order = (
                list(range(count))
                if seed is None
                else seeded_permutation(count, seed=seed, epoch=self.number, salt=self._salt).tolist()
            )
            self._ordered = (self.number, order)
        return self._ordered[1]

    def _end_pass(self) -> None:
        if not self._has_records:
            raise (
                self._bad.as_error(self.name)
                if self._bad.count
                else DataError(f"{self.name} contains no records")
            )
        self.number, self._shard = self.number + 1, 0
        self._bad, self._has_records = Skipped(), False


class RecordStream:
    """The records of a source without end, in an order that is saved and continued exactly.

    With weights, each record comes from the source that is furthest behind its share.

    Args:
        source: The source to read.
        seed: Seed of the order of shards; None to keep their order.
        total_steps: The steps of the run, for weights that change over it.
    """

    def __init__(self, source: Source, *, seed: int | None, total_steps: int) -> None:
        parts = list(source.sources) if isinstance(source, CombinedSource) else [source]
        singles = [part for part in parts if isinstance(part, SingleSource)]
        weights = source.weights if isinstance(source, CombinedSource) else None
        groups = [singles] if weights is None else [[single] for single in singles]
        self._readers = [PassReader(group, seed=seed, salt=index) for index, group in enumerate(groups)]
        self._weights: Sequence[Weight] = [1.0] if weights is None else weights
        self._credits = [0.0] * len(self._readers)  # records by which each reader is behind its share
        self._total_steps = total_steps
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise a ConfigError if all weights are 0 at a step: then they are 0 at a step of some schedule."""
        schedules = [weight for weight in self._weights if isinstance(weight, Mapping)]
        points = {at if at >= 1 else int(at * self._total_steps) for each in schedules for at in each}
        for step in sorted({0, self._total_steps, *map(int, points)}):
            if not any(weight_at(weight, step, total_steps=self._total_steps) for weight in self._weights):
                raise ConfigError(
                    f"data.train: the weights of all sources are 0 at step {step}",
                    hint="give at least one source a weight above 0 at every step",
                )

    def read(self, count: int, *, step: int) -> Iterator[Record | DataError]:
        """Yield `count` records, bad ones included, mixed with the weights of a step, counted from 0.

        Without weights, it stops at the end of a pass, so that no record comes twice in a block.
        """
        weights = [weight_at(weight, step, total_steps=self._total_steps) for weight in self._weights]
        total = sum(weights)
        shares = [weight / total for weight in weights]
        for _ in itertools.repeat(None, count):
            self._credits = [credit + share for credit, share in zip(self._credits, shares, strict=True)]
            chosen = self._credits.index(max(self._credits))
            self._credits[chosen] -= 1.0
            reader = self._readers[chosen]
            record = reader.next_record()
            if record is None and len(self._readers) == 1:
                return
            while record is None:
                record = reader.next_record()
            yield record

    @property
    def passes(self) -> int:
        """The number of complete passes over all sources."""
        return min(reader.number for reader in self._readers)

    def state(self) -> StreamState:
        """Return the position in every source."""
        return {"sources": [reader.state() for reader in self._readers], "credits": list(self._credits)}

    def seek(self, state: StreamState) -> None:
        """Continue from a position that `state` returned."""
        for reader, position in zip(self._readers, state["sources"], strict=True):
            reader.seek(position)
        self._credits = list(state["credits"])

    def close(self) -> None:
        """Close all open files."""
        for reader in self._readers:
            reader.close()


class StreamedSource:
    """A source that is streamed: its length is unknown, and iterating over it gives its first records.

    Args:
        source: The source.
        buffer: The number of first records.
        skip_bad: Whether to skip bad records instead of raising their errors.
    """

    def __init__(self, source: Source, *, buffer: int, skip_bad: bool) -> None:
        self.name = f"{source.name} (streamed)"
        self.source = source
        self.buffer = buffer
        self.skipped = Skipped()
        self._skip_bad = skip_bad

    def open(self, *, seed: int | None, total_steps: int) -> RecordStream:
        """Return a stream of all records, from the start."""
        return RecordStream(self.source, seed=seed, total_steps=total_steps)

    def __iter__(self) -> Iterator[Record]:
        with contextlib.closing(self.open(seed=None, total_steps=1)) as stream:
            for record in stream.read(self.buffer, step=0):
                if isinstance(record, Record):
                    yield record
                elif not self._skip_bad:
                    raise record

    def digest(self) -> str:
        """Return a digest of what is cheap to read of every source, and of their weights."""
        return digest_text(f"stream {_identify(self.source)}")


def _identify(source: Source) -> str:
    if isinstance(source, CombinedSource):
        return repr([[_identify(part) for part in source.sources], source.weights])
    assert isinstance(source, SingleSource)
    return source.identity()
