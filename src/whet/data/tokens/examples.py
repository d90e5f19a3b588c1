"""Examples: token ids with a mark on each that is learned, in memory or cut out of a token store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from whet.data.tokens.token_store import TokenStore
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.data.tokens.teacher_logprobs import Taught, Teaching

MOST_CUT = 0.10  # of the records, truncated or dropped, before a warning

TooLong = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True)
class Example:
    """Token ids, a mark on each that is learned, and where they came from."""

    tokens: Sequence[int] | np.ndarray
    supervised: Sequence[bool] | np.ndarray
    origin: str
    values: tuple[float, ...] = ()  # numbers that came with it, such as how hard it is
    taught: "tuple[Taught, ...]" = ()  # what each of some teachers said of its supervised targets

    @property
    def length(self) -> int:
        """Positions it takes in a batch: the last token is only ever a target."""
        return len(self.tokens) - 1

    @property
    def supervised_count(self) -> int:
        """Targets it has; the first token has nothing before it to be predicted from."""
        return int(np.count_nonzero(self.supervised[1:]))


Pair = tuple[Example, Example]  # a preferred answer and a worse one


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
        judged: bool = False,
    ) -> None:
        self.store = store
        self.judged = judged  # texts that are classified: the last token of each is never read
        self.records = records  # [examples] the record of the store each was cut from
        self.starts = starts
        self.stops = stops
        self.counts = counts  # what was done to records that were too long
        self.supervised = supervised
        self.teachings: Sequence[Teaching] = ()  # what teachers said of them, once it has been looked up

    @property
    def lengths(self) -> np.ndarray:
        """Positions that each example takes in a batch."""
        return self.stops - self.starts - 1

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # slices are not needed
        record = int(self.records[index])
        tokens, supervised = self.store.read(int(self.starts[index]), int(self.stops[index]))
        taught = tuple(teaching[index] for teaching in self.teachings)
        return Example(tokens, supervised, self.store.origin(record), self.store.values_of(record), taught)

    def supervised_counts(self) -> np.ndarray:
        """Targets that each example has; only those that were cut are read."""
        found = np.array(self.store.learned[self.records], dtype=np.int64)
        begin, end = (self.store.bounds[self.records + after] for after in (0, 1))
        for index in np.flatnonzero((self.starts != begin) | (self.stops != end)).tolist():
            window = np.array([[self.starts[index], self.stops[index]]])
            found[index] = self.store.count_learned(int(self.records[index]), window)[0]
        return found

    def only(self, places: np.ndarray) -> "StoredExamples":
        """Some of them."""
        records = self.records[places]
        supervised = int(self.store.learned[records].sum())
        return StoredExamples(
            self.store,
            records,
            self.starts[places],
            self.stops[places],
            counts={},
            supervised=supervised,
            judged=self.judged,
        )

    @property
    def sides(self) -> "StoredExamples":
        """The examples one by one, as of pairs, too."""
        return self

    def summary(self) -> str:
        """Counts and lengths, for a person."""
        return f"{len(self):,} examples, {self.describe_sizes('record')}"

    def describe_sizes(self, unit: str) -> str:
        """Tokens and lengths, and what became of units (records, pairs) that were too long."""
        sizes = np.sort(self.stops - self.starts - self.judged)
        quantiles = "/".join(str(sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
        changed = "".join(
            f", {count:,} {unit}{'s' * (count != 1)} {what}" for what, count in self.counts.items() if count
        )
        supervised = "" if self.judged else f" ({self.supervised:,} supervised)"
        return f"{sizes.sum():,} tokens{supervised}, length min/median/p95/max {quantiles}{changed}"


def lengths_of(examples: Sequence[Example] | Sequence[Pair]) -> np.ndarray:
    """Positions that each example takes in a batch."""
    known = getattr(examples, "lengths", None)  # sequences that need not read their examples to tell
    if known is not None:
        found: np.ndarray = known
        return found
    return np.array(
        [sum(e.length for e in (item if isinstance(item, tuple) else (item,))) for item in examples],
        dtype=np.int64,
    )


def cut(store: TokenStore, *, max_length: int, too_long: TooLong, judged: bool = False) -> StoredExamples:
    """The records of a store as examples of at most `max_length` tokens.

    A longer record is refused, dropped, cut at its end, or split into windows. A window starts with the last
    token of the one before, so that each token is predicted once. What has nothing left to learn is dropped.
    """
    starts, stops = store.bounds[:-1], store.bounds[1:]
    max_length += judged  # the last token of a text that is judged is one too many
    long = np.flatnonzero(stops - starts > max_length)
    if too_long == "error" and len(long):
        first = int(long[0])
        raise DataError(
            f"{store.origin(first)}: {stops[first] - starts[first] - judged} tokens, and data.max_length is "
            f"{max_length - judged}",
            hint=too_long_hint(can_split=not judged),
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
            hint=f"data.max_length is {max_length - judged}: raise it",
        )
    order = np.argsort(records, kind="stable")  # in the order of the records
    return StoredExamples(
        store,
        records[order],
        begin[order],
        end[order],
        counts=counts,
        supervised=supervised,
        judged=judged,
    )


def _windows(start: int, stop: int, max_length: int) -> np.ndarray:
    """[windows, 2]: pieces of at most `max_length` tokens that share one token with the next."""
    begin = np.arange(start, stop - 1, max_length - 1)
    return np.stack((begin, np.minimum(begin + max_length, stop)), axis=1)


class StoredPairs(Sequence[Pair]):
    """Examples 2i and 2i + 1 of a store as pairs."""

    def __init__(self, sides: StoredExamples, *, pack: bool) -> None:
        self.sides = sides
        self.pack = pack
        self.references: np.ndarray | None = None  # [pairs, 2]: what a reference model made of both

    @property
    def store(self) -> TokenStore:
        """Where they are read from."""
        return self.sides.store

    @property
    def lengths(self) -> np.ndarray:
        """Positions that each pair takes in a batch; padded, both rows are as wide as the longer one."""
        sides = self.sides.lengths.reshape(-1, 2)
        found: np.ndarray = sides.sum(1) if self.pack else 2 * sides.max(1)
        return found

    def __len__(self) -> int:
        return len(self.sides) // 2

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]  # slices are not needed
        chosen, rejected = self.sides[2 * index], self.sides[2 * index + 1]
        if self.references is None:
            return chosen, rejected
        said = self.references[index]
        return replace(chosen, values=(float(said[0]),)), replace(rejected, values=(float(said[1]),))

    def summary(self) -> str:
        """Counts and lengths, for a person."""
        return f"{len(self):,} pairs of chosen and rejected, {self.sides.describe_sizes('pair')}"


def cut_warning(counts: Mapping[str, int], units: int, *, can_split: bool) -> tuple[str, str] | None:
    """What is wrong, and what to do, where more than a few of the records or pairs are cut off or dropped."""
    cut_off = counts.get("truncated", 0) + counts.get("dropped", 0)
    if cut_off <= MOST_CUT * units:
        return None
    return (
        f"{cut_off / units:.0%} of the records are cut off or dropped (more than {MOST_CUT:.0%})",
        "raise data.max_length" + (", or set data.too_long to split" if can_split else ""),
    )


def too_long_hint(*, can_split: bool) -> str:
    """What to do where a record is longer than it may be."""
    ways = "truncate, drop or split" if can_split else "truncate or drop"
    return f"raise data.max_length, or set data.too_long to {ways}"


def cut_pairs(store: TokenStore, *, max_length: int, too_long: TooLong, pack: bool) -> StoredPairs:
    """The pairs of a store, no side longer than `max_length`; a pair that loses an answer is dropped."""
    if too_long == "split":
        raise DataError("pairs cannot be split into windows", hint="set data.too_long to truncate or drop")
    starts, stops = store.bounds[:-1].reshape(-1, 2), store.bounds[1:].reshape(-1, 2)
    over = np.asarray(stops - starts > max_length)
    long: np.ndarray = np.logical_or(over[:, 0], over[:, 1])
    if too_long == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise DataError(
            f"{store.origin(2 * first)}: {(stops - starts)[first].max()} tokens, and data.max_length is "
            f"{max_length}",
            hint=too_long_hint(can_split=False),
        )
    ends = np.minimum(stops, starts + max_length)
    learned = np.array(store.learned, dtype=np.int64).reshape(-1, 2)
    for pair, side in np.argwhere(over).tolist():
        window = np.array([[starts[pair, side], ends[pair, side]]])
        learned[pair, side] = store.count_learned(2 * pair + side, window)[0]
    kept = np.flatnonzero(~long if too_long == "drop" else (learned > 0).all(1))
    if not len(kept):
        raise DataError(
            f"no pair is left: all {len(long)} were dropped",
            hint=f"data.max_length is {max_length}: raise it",
        )
    sides = StoredExamples(
        store,
        np.stack((2 * kept, 2 * kept + 1), axis=1).ravel(),
        starts[kept].ravel(),
        ends[kept].ravel(),
        counts={"truncated": int(long[kept].sum()), "dropped": len(long) - len(kept)},
        supervised=int(learned[kept].sum()),
    )
    return StoredPairs(sides, pack=pack)
