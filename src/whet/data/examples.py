"""Examples: token ids with a mark on each that is learned, in memory or cut out of a token store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whet.data.store import TokenStore
from whet.errors import DataError

TooLong = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True)
class Example:
    """Token ids, a mark on each that is learned, and where they came from."""

    tokens: Sequence[int] | np.ndarray
    supervised: Sequence[bool] | np.ndarray
    origin: str
    values: tuple[float, ...] = ()  # numbers that came with it, such as how hard it is

    @property
    def length(self) -> int:
        """Positions it takes in a batch: the last token is only ever a target."""
        return len(self.tokens) - 1

    @property
    def supervised_count(self) -> int:
        """Targets it has; the first token has nothing before it to be predicted from."""
        return int(np.count_nonzero(self.supervised[1:]))


class StoredExamples(Sequence[Example]):
    """The examples of a store, none longer than asked for; read from disk as they are used."""

    def __init__(
        self,
        store: TokenStore,
        records: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        *,
        counts: dict[str, int],
        supervised: int,
    ) -> None:
        self.store = store
        self.records = records  # [examples] the record of the store each was cut from
        self.starts = starts
        self.stops = stops
        self.counts = counts  # what was done to records that were too long
        self.supervised = supervised

    @property
    def lengths(self) -> np.ndarray:
        """Positions that each example takes in a batch."""
        return self.stops - self.starts - 1

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # slices are not needed
        tokens, supervised = self.store.read(int(self.starts[index]), int(self.stops[index]))
        return Example(tokens, supervised, self.store.origin(int(self.records[index])))

    def summary(self) -> str:
        """Counts and lengths, for a person."""
        sizes = np.sort(self.stops - self.starts)
        quantiles = "/".join(str(sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
        changed = "".join(f", {count:,} {what}" for what, count in self.counts.items() if count)
        return (
            f"{len(self):,} examples, {sizes.sum():,} tokens ({self.supervised:,} supervised), "
            f"length min/median/p95/max {quantiles}{changed}"
        )


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """Positions that each example takes in a batch."""
    known = getattr(examples, "lengths", None)  # sequences that need not read their examples to tell
    if known is not None:
        found: np.ndarray = known
        return found
    return np.array([example.length for example in examples], dtype=np.int64)


def cut(store: TokenStore, *, max_length: int, too_long: TooLong) -> StoredExamples:
    """The records of a store as examples of at most `max_length` tokens.

    A longer record is refused, dropped, cut at its end, or split into windows. A window starts with the last
    token of the one before, so that each token is predicted once. What has nothing left to learn is dropped.
    """
    starts, stops = store.bounds[:-1], store.bounds[1:]
    long = np.flatnonzero(stops - starts > max_length)
    if too_long == "error" and len(long):
        first = int(long[0])
        raise DataError(
            f"{store.origin(first)}: {stops[first] - starts[first]} tokens, and data.max_length is "
            f"{max_length}",
            hint="raise data.max_length, or set data.too_long to truncate, drop or split",
        )
    counts = dict.fromkeys(("truncated", "split", "dropped"), 0)
    fits = np.flatnonzero(stops - starts <= max_length)
    pieces = [(fits, starts[fits], stops[fits])]
    supervised = int(store.learned[fits].sum())
    for record in long.tolist() if too_long in ("truncate", "split") else []:
        windows = _windows(int(starts[record]), int(stops[record]), max_length)
        if too_long == "truncate":
            windows = windows[:1]
        learned = store.count_learned(record, windows)
        supervised += int(learned.sum())
        windows = windows[learned > 0]
        counts["truncated" if too_long == "truncate" else "split"] += len(windows) > 0
        counts["dropped"] += len(windows) == 0
        pieces.append((np.full(len(windows), record), windows[:, 0], windows[:, 1]))
    if too_long == "drop":
        counts["dropped"] = len(long)
    records, begin, end = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    if not len(records):
        raise DataError(
            f"no example is left: all {counts['dropped']} were dropped (the last one: "
            f"{store.origin(len(store) - 1)})",
            hint=f"data.max_length is {max_length}: raise it",
        )
    order = np.argsort(records, kind="stable")  # in the order of the records
    return StoredExamples(
        store, records[order], begin[order], end[order], counts=counts, supervised=supervised
    )


def _windows(start: int, stop: int, max_length: int) -> np.ndarray:
    """[windows, 2]: pieces of at most `max_length` tokens that share one token with the next."""
    begin = np.arange(start, stop - 1, max_length - 1)
    return np.stack((begin, np.minimum(begin + max_length, stop)), axis=1)
