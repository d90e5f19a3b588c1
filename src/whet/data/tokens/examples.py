"""Examples: token ids with a loss mask, in memory or read from a token store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from whet.data.tokens.token_store import TokenArrays
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.data.tokens.teacher_logprobs import TeacherLogprobs, TeacherTargets

MAX_SHORTENED = 0.10  # warn if a larger fraction of records is truncated or dropped

TooLong = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True)
class Example:
    """Token ids with a loss mask and their origin."""

    tokens: Sequence[int] | np.ndarray
    supervised: Sequence[bool] | np.ndarray
    origin: str
    values: tuple[float, ...] = ()  # numeric columns, for example a difficulty score
    teacher_targets: "tuple[TeacherTargets, ...]" = ()  # of each teacher, at the supervised targets
    weights: Sequence[float] | np.ndarray | None = None  # loss weight of each token; None: 1 where supervised

    @property
    def length(self) -> int:
        """The number of positions in a batch: the last token is only a target."""
        return len(self.tokens) - 1

    @property
    def supervised_count(self) -> int:
        """The number of supervised targets. The first token is never a target."""
        return int(np.count_nonzero(self.supervised[1:]))


Pair = tuple[Example, Example]  # chosen and rejected


class StoredExamples(Sequence[Example]):
    """The examples of a store, limited in length, and read from disk when accessed."""

    def __init__(
        self,
        store: TokenArrays,
        records: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        *,
        counts: dict[str, int],
        supervised: int,
        judged: bool = False,
    ) -> None:
        self.store = store
        self.is_classification = judged  # inputs to classify: the last token of each is never read
        self.records = records  # [examples] index of the record in the store
        self.starts = starts
        self.stops = stops
        self.length_counts = counts  # number of records truncated, split and dropped
        self.supervised = supervised
        self.teacher_logprobs: Sequence[TeacherLogprobs] = ()  # log-probabilities per teacher, once loaded

    @property
    def lengths(self) -> np.ndarray:
        """The number of positions of each example in a batch."""
        return self.stops - self.starts - 1

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # slices are not needed
        record = int(self.records[index])
        start, stop = int(self.starts[index]), int(self.stops[index])
        tokens, supervised = self.store.read(start, stop)
        teacher_targets = tuple(logprobs[index] for logprobs in self.teacher_logprobs)
        origin, values = self.store.origin(record), self.store.column_values(record)
        return Example(
            tokens, supervised, origin, values, teacher_targets, self.store.read_weights(start, stop)
        )

    def supervised_counts(self) -> np.ndarray:
        """Return the number of supervised targets per example. Only truncated examples are read."""
        counts = np.array(self.store.supervised_counts[self.records], dtype=np.int64)
        begin, end = (self.store.bounds[self.records + offset] for offset in (0, 1))
        for index in np.flatnonzero((self.starts != begin) | (self.stops != end)).tolist():
            window = np.array([[self.starts[index], self.stops[index]]])
            counts[index] = self.store.count_supervised(int(self.records[index]), window)[0]
        return counts

    def select(self, indices: np.ndarray) -> "StoredExamples":
        """Return the examples at these indices."""
        records = self.records[indices]
        supervised = int(self.store.supervised_counts[records].sum())
        return StoredExamples(
            self.store,
            records,
            self.starts[indices],
            self.stops[indices],
            counts={},
            supervised=supervised,
            judged=self.is_classification,
        )

    @property
    def sides(self) -> "StoredExamples":
        """The individual examples; the same property of pairs returns both sides."""
        return self

    def summary(self) -> str:
        """Return counts and lengths as one line."""
        return f"{len(self):,} examples, {self.describe_sizes('record')}"

    def describe_sizes(self, unit: str) -> str:
        """Return token counts, lengths and the number of shortened units (records or pairs) as text."""
        sizes = np.sort(self.stops - self.starts - self.is_classification)
        quantiles = "/".join(str(sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
        changed = "".join(
            f", {count:,} {unit}{'s' * (count != 1)} {action}"
            for action, count in self.length_counts.items()
            if count
        )
        supervised = "" if self.is_classification else f" ({self.supervised:,} supervised)"
        return f"{sizes.sum():,} tokens{supervised}, length min/median/p95/max {quantiles}{changed}"


def lengths_of(examples: Sequence[Example] | Sequence[Pair]) -> np.ndarray:
    """Return the number of positions of each example or pair in a batch."""
    stored = getattr(examples, "lengths", None)  # stored examples know their lengths without reading
    if stored is not None:
        lengths: np.ndarray = stored
        return lengths
    return np.array(
        [sum(e.length for e in (item if isinstance(item, tuple) else (item,))) for item in examples],
        dtype=np.int64,
    )


def build_examples(
    store: TokenArrays,
    *,
    max_length: int,
    too_long: TooLong,
    is_classification: bool = False,
    may_be_empty: bool = False,
) -> StoredExamples:
    """Return the records of a store as examples of at most `max_length` tokens.

    Args:
        store: The tokenized records.
        max_length: The maximum number of tokens of an example.
        too_long: Whether a longer record raises an error, is dropped, truncated or split into windows. Each
            window starts with the last token of the previous one, so every token is predicted once. Records
            and windows without supervised targets are dropped.
        is_classification: Whether the examples are inputs to classify.
        may_be_empty: Whether the store may have no example, such as one block of a stream.

    Raises:
        DataError: A record is too long with `too_long="error"`, or no example is left.
    """
    starts, stops = store.bounds[:-1], store.bounds[1:]
    max_length += is_classification  # inputs to classify have one extra token
    too_long_records = np.flatnonzero(stops - starts > max_length)
    if too_long == "error" and len(too_long_records):
        first = int(too_long_records[0])
        raise DataError(
            f"{store.origin(first)}: the record has {stops[first] - starts[first] - is_classification} "
            f"tokens, but data.max_length is {max_length - is_classification}",
            hint=too_long_hint(can_split=not is_classification),
        )
    counts = dict.fromkeys(("truncated", "split", "dropped"), 0)
    fits = np.flatnonzero(stops - starts <= max_length)
    pieces = [(fits, starts[fits], stops[fits])]
    supervised = int(store.supervised_counts[fits].sum())
    for record in too_long_records.tolist() if too_long in ("truncate", "split") else []:
        windows = _windows(int(starts[record]), int(stops[record]), max_length)
        if too_long == "truncate":
            windows = windows[:1]
        targets = store.count_supervised(record, windows)
        supervised += int(targets.sum())
        windows = windows[targets > 0]
        counts["truncated" if too_long == "truncate" else "split"] += len(windows) > 0
        counts["dropped"] += len(windows) == 0
        pieces.append((np.full(len(windows), record), windows[:, 0], windows[:, 1]))
    if too_long == "drop":
        counts["dropped"] = len(too_long_records)
    records, begin, end = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    if not len(records) and not may_be_empty:
        raise DataError(
            f"no example is left: all {counts['dropped']} records were dropped (the last one is "
            f"{store.origin(len(store) - 1)})",
            hint=f"raise data.max_length, which is {max_length - is_classification}",
        )
    order = np.argsort(records, kind="stable")  # restores record order
    return StoredExamples(
        store,
        records[order],
        begin[order],
        end[order],
        counts=counts,
        supervised=supervised,
        judged=is_classification,
    )


def _windows(start: int, stop: int, max_length: int) -> np.ndarray:
    """Return windows [windows, 2] of at most `max_length` tokens; adjacent windows share one token."""
    begin = np.arange(start, stop - 1, max_length - 1)
    return np.stack((begin, np.minimum(begin + max_length, stop)), axis=1)


class StoredPairs(Sequence[Pair]):
    """Examples 2i and 2i + 1 of a store as pairs of chosen and rejected."""

    def __init__(self, sides: StoredExamples, *, pack: bool) -> None:
        self.sides = sides
        self.pack = pack
        self.reference_logprobs: np.ndarray | None = (
            None  # [pairs, 2]: log-probabilities of the reference model
        )

    @property
    def store(self) -> TokenArrays:
        """The token store of the examples."""
        return self.sides.store

    @property
    def lengths(self) -> np.ndarray:
        """The positions of each pair in a batch; without packing, both rows have the longer width."""
        sides = self.sides.lengths.reshape(-1, 2)
        lengths: np.ndarray = sides.sum(1) if self.pack else 2 * sides.max(1)
        return lengths

    def __len__(self) -> int:
        return len(self.sides) // 2

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]  # slices are not needed
        chosen, rejected = self.sides[2 * index], self.sides[2 * index + 1]
        if self.reference_logprobs is None:
            return chosen, rejected
        logprobs = self.reference_logprobs[index]
        return replace(chosen, values=(float(logprobs[0]),)), replace(rejected, values=(float(logprobs[1]),))

    def summary(self) -> str:
        """Return counts and lengths as one line."""
        return f"{len(self):,} pairs of chosen and rejected, {self.sides.describe_sizes('pair')}"


def shortening_warning(counts: Mapping[str, int], units: int, *, can_split: bool) -> tuple[str, str] | None:
    """Return a warning and its fix if too many records or pairs are truncated or dropped, else None."""
    shortened = counts.get("truncated", 0) + counts.get("dropped", 0)
    if shortened <= MAX_SHORTENED * units:
        return None
    return (
        f"{shortened / units:.0%} of the records are truncated or dropped (more than {MAX_SHORTENED:.0%})",
        "raise data.max_length" + (", or set data.too_long to split" if can_split else ""),
    )


def too_long_hint(*, can_split: bool) -> str:
    """Return how to fix a record that is too long."""
    options = "truncate, drop or split" if can_split else "truncate or drop"
    return f"raise data.max_length, or set data.too_long to {options}"


def build_pairs(store: TokenArrays, *, max_length: int, too_long: TooLong, pack: bool) -> StoredPairs:
    """Return the pairs of a store, limited in length. A pair without a supervised completion is dropped."""
    if too_long == "split":
        raise DataError("pairs cannot be split into windows", hint="set data.too_long to truncate or drop")
    starts, stops = store.bounds[:-1].reshape(-1, 2), store.bounds[1:].reshape(-1, 2)
    is_too_long = np.asarray(stops - starts > max_length)
    has_long_side: np.ndarray = np.logical_or(is_too_long[:, 0], is_too_long[:, 1])
    if too_long == "error" and has_long_side.any():
        first = int(np.flatnonzero(has_long_side)[0])
        raise DataError(
            f"{store.origin(2 * first)}: one side of the pair has {(stops - starts)[first].max()} tokens, "
            f"but data.max_length is {max_length}",
            hint=too_long_hint(can_split=False),
        )
    ends = np.minimum(stops, starts + max_length)
    targets = np.array(store.supervised_counts, dtype=np.int64).reshape(-1, 2)
    for pair, side in np.argwhere(is_too_long).tolist():
        window = np.array([[starts[pair, side], ends[pair, side]]])
        targets[pair, side] = store.count_supervised(2 * pair + side, window)[0]
    selected = np.flatnonzero(~has_long_side if too_long == "drop" else (targets > 0).all(1))
    if not len(selected):
        raise DataError(
            f"no pair is left: all {len(has_long_side)} pairs were dropped",
            hint=f"raise data.max_length, which is {max_length}",
        )
    sides = StoredExamples(
        store,
        np.stack((2 * selected, 2 * selected + 1), axis=1).ravel(),
        starts[selected].ravel(),
        ends[selected].ravel(),
        counts={
            "truncated": int(has_long_side[selected].sum()),
            "dropped": len(has_long_side) - len(selected),
        },
        supervised=int(targets[selected].sum()),
    )
    return StoredPairs(sides, pack=pack)
