"""Which examples make a step, and how it is cut into micro-batches: pure functions of lengths and seeds."""

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whet.errors import ConfigError, DataError

Order = Literal["shuffle", "sequential", "mlx"]
DEFAULT_MICRO_BATCH_TOKENS = 4096
PAD_TO = 32  # padded rows are a multiple of this wide: few shapes, for kernels and compilers


@dataclass(frozen=True)
class StepSettings:
    """How much goes into a step (`batch_size` or `batch_tokens`) and how much is computed at once."""

    batch_size: int | None
    batch_tokens: int | None
    micro_batch_tokens: int | None
    pack: bool
    order: Order = "shuffle"
    drop_last: bool = False  # leave out the examples of an epoch that do not fill a step of batch_size

    def __post_init__(self) -> None:
        if self.order == "mlx" and (self.pack or self.batch_size is None):
            raise ConfigError("data.order: mlx needs run.batch_size, and data.pack: false")

    @property
    def micro_tokens(self) -> int:
        """Positions in one micro-batch, padding included."""
        return self.micro_batch_tokens or min(
            self.batch_tokens or DEFAULT_MICRO_BATCH_TOKENS, DEFAULT_MICRO_BATCH_TOKENS
        )

    def padded(self, length: int) -> int:
        """How wide a padded row is whose longest example takes `length` positions."""
        if self.pack:
            return length
        # mlx counts the token that is only a target, too
        width = -(-(length + (self.order == "mlx")) // PAD_TO) * PAD_TO
        return max(length, min(width, self.micro_tokens))

    def check(self, longest: int, origin: str, *, texts: int = 1) -> None:
        """Refuse an example that no micro-batch or no step can hold.

        `texts`: how many it is made of, each cut at data.max_length; 0: it is not cut.
        """
        for key, limit in (("batch_tokens", self.batch_tokens), ("micro_batch_tokens", self.micro_tokens)):
            if limit is not None and longest > limit:
                # the last token of a text is only a target, and takes no room
                fits = limit // texts + 1 if texts else 0
                lower = f", or lower data.max_length to {fits}" if fits > 1 else ""
                raise DataError(
                    f"{origin}: {longest + 1} tokens do not fit run.{key}={limit}",
                    hint=f"raise run.{key}{lower}",
                )


class EpochPlan:
    """The steps of one epoch: indices of examples, and where each step ends among them."""

    def __init__(self, indices: np.ndarray, ends: np.ndarray) -> None:
        self.indices = indices
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, step: int) -> list[int]:
        start = self.ends[step - 1] if step else 0
        chosen: list[int] = self.indices[start : self.ends[step]].tolist()
        return chosen

    def __iter__(self) -> Iterator[list[int]]:
        return (self[step] for step in range(len(self)))


def plan_epoch(
    lengths: Sequence[int] | np.ndarray, settings: StepSettings, *, seed: int, epoch: int
) -> EpochPlan:
    """The steps of one epoch; every example appears exactly once (mlx's order drops the tail).

    Packed steps are random examples. Padded ones are neighbours in length, in random order: less padding.
    What is in a step does not depend on micro_batch_tokens: that changes memory, never the run.
    """
    lengths = np.asarray(lengths)
    match settings.order:
        case "sequential":
            return _in_order(np.arange(len(lengths)), lengths, settings)
        case "mlx":
            return _mlx(lengths, settings, seed=seed + epoch)
    order = permutation(len(lengths), seed=seed, epoch=epoch)
    if settings.pack and settings.batch_tokens is not None:
        plan = _best_fit(order, lengths, settings.batch_tokens)
    elif settings.pack:
        return _in_order(order, lengths, settings)
    else:
        # equal lengths stay in random order, so that no group is the same in every epoch
        plan = _in_order(order[np.argsort(lengths[order], kind="stable")], lengths, settings)
    return _rearranged(plan, permutation(len(plan), seed=seed, epoch=epoch, salt=1))


def _in_order(order: np.ndarray, lengths: np.ndarray, settings: StepSettings) -> EpochPlan:
    """Fill one step after the other."""
    if settings.batch_size is not None and settings.drop_last:
        order = order[: len(order) // settings.batch_size * settings.batch_size]
    if settings.batch_size is not None:
        ends = np.arange(settings.batch_size, len(order) + settings.batch_size, settings.batch_size)
        return EpochPlan(order, np.minimum(ends, len(order)))
    if settings.batch_tokens is None:
        raise ConfigError("a step needs batch_size or batch_tokens")
    ends_found: list[int] = []
    room = settings.batch_tokens
    for place, length in enumerate(lengths[order].tolist()):
        if length > room and place:
            ends_found.append(place)
            room = settings.batch_tokens
        room -= length
    return EpochPlan(order, np.array([*ends_found, len(order)]))


def _best_fit(order: np.ndarray, lengths: np.ndarray, capacity: int) -> EpochPlan:
    """Put each example into the fullest step that still has room for it, the oldest of equals."""
    steps_of: list[int] = []
    rooms: list[int] = []  # what is left in the open steps: sorted, each number once
    waiting: dict[int, list[int]] = {}  # the open steps that have this much left, as a heap
    count = 0
    for length in lengths[order].tolist():
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            step = heapq.heappop(waiting[room])
            if not waiting[room]:
                del rooms[place]
        else:
            room, step = capacity, count
            count += 1
        steps_of.append(step)
        if (left := room - length) > 0:
            heap = waiting.setdefault(left, [])
            if not heap:
                bisect.insort(rooms, left)
            heapq.heappush(heap, step)
    found = np.array(steps_of, dtype=np.int64)
    return EpochPlan(order[np.argsort(found, kind="stable")], np.cumsum(np.bincount(found)))


def _mlx(lengths: np.ndarray, settings: StepSettings, *, seed: int) -> EpochPlan:
    """mlx-lm's batches: sorted by length, in groups whose order is shuffled; what is left over is dropped."""
    size = settings.batch_size or 1
    groups = len(lengths) // size
    if not groups:
        raise DataError(f"{len(lengths)} examples do not fill one batch of {size}")
    order = np.argsort(lengths, kind="stable")[: groups * size]
    return _rearranged(
        EpochPlan(order, np.arange(size, groups * size + 1, size)), fisher_yates(groups, seed=seed)
    )


def _rearranged(plan: EpochPlan, order: np.ndarray) -> EpochPlan:
    """The same steps in another order."""
    starts = np.concatenate(([0], plan.ends[:-1]))
    sizes = (plan.ends - starts)[order]
    ends = np.cumsum(sizes)
    # for each new place: where its step began before, and how far into the step it is
    inside = np.arange(len(plan.indices)) - np.repeat(ends - sizes, sizes)
    return EpochPlan(plan.indices[np.repeat(starts[order], sizes) + inside], ends)


def permutation(count: int, *, seed: int, epoch: int, salt: int = 0) -> np.ndarray:
    """A permutation of range(count) that is the same on every platform: sorted SplitMix64 outputs."""
    start = _mix(_mix(_mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) ^ np.uint64(epoch)) ^ np.uint64(salt))
    with np.errstate(over="ignore"):
        keys = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return np.argsort(keys, kind="stable")


def fisher_yates(count: int, *, seed: int) -> np.ndarray:
    """Fisher-Yates from the last place down, drawing SplitMix64's numbers modulo what is left."""
    with np.errstate(over="ignore"):
        drawn = _mix(
            np.uint64(seed & 0xFFFFFFFFFFFFFFFF) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        )
    order = list(range(count))
    for last, number in zip(range(count - 1, 0, -1), drawn.tolist(), strict=False):
        chosen = number % (last + 1)
        order[last], order[chosen] = order[chosen], order[last]
    return np.array(order, dtype=np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's output function, on one number or many."""
    z = np.asarray(value, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def split_step(
    step: Sequence[int], lengths: Sequence[int] | np.ndarray, settings: StepSettings
) -> list[list[list[int]]]:
    """Cut a step into micro-batches of rows of examples.

    Packed: one row a micro-batch, filled best-fit-decreasing. Padded: rows of one example, neighbours in
    length together, at most micro_tokens positions with the padding.
    """
    longest_first = sorted(step, key=lambda index: (-lengths[index], index))
    if settings.pack:
        plan = _best_fit(np.array(longest_first), np.asarray(lengths), settings.micro_tokens)
        return [[row] for row in plan]
    batches: list[list[list[int]]] = []
    for index in longest_first:
        if batches:
            width = settings.padded(int(lengths[batches[-1][0][0]]))
            if width * (len(batches[-1]) + 1) <= settings.micro_tokens:
                batches[-1].append([index])
                continue
        batches.append([[index]])
    return batches
