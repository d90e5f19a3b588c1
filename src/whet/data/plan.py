"""Which examples make a step, and how it is cut into micro-batches: pure functions of lengths and seeds."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.data.render import Example
from whet.errors import ConfigError, DataError

DEFAULT_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class StepSettings:
    """How much goes into a step (`batch_size` or `batch_tokens`) and how much is computed at once."""

    batch_size: int | None
    batch_tokens: int | None
    micro_batch_tokens: int | None
    pack: bool
    shuffle: bool

    @property
    def micro_tokens(self) -> int:
        """Positions in one micro-batch, padding included."""
        return self.micro_batch_tokens or min(
            self.batch_tokens or DEFAULT_MICRO_BATCH_TOKENS, DEFAULT_MICRO_BATCH_TOKENS
        )

    def check(self, examples: Sequence[Example]) -> None:
        """Refuse examples that no micro-batch or no step can hold."""
        longest = max(examples, key=lambda example: example.length)
        for key, limit in (("batch_tokens", self.batch_tokens), ("micro_batch_tokens", self.micro_tokens)):
            if limit is not None and longest.length > limit:
                raise DataError(
                    f"{longest.origin}: {len(longest.tokens)} tokens do not fit run.{key}={limit}",
                    hint=f"raise run.{key}, or lower data.max_length to {limit}",
                )


def permutation(count: int, *, seed: int, epoch: int, salt: int = 0) -> list[int]:
    """A permutation of range(count) that is the same on every platform: sorted SplitMix64 outputs."""
    start = _mix(_mix(_mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) ^ np.uint64(epoch)) ^ np.uint64(salt))
    with np.errstate(over="ignore"):
        keys = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's output function, on one number or many."""
    z = np.asarray(value, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def plan_epoch(lengths: Sequence[int], settings: StepSettings, *, seed: int, epoch: int) -> list[list[int]]:
    """The steps of one epoch as lists of example indices; every example appears exactly once.

    What is in a step does not depend on micro_batch_tokens or packing: those change memory, never the run.
    """
    count = len(lengths)
    order = permutation(count, seed=seed, epoch=epoch) if settings.shuffle else list(range(count))
    if settings.batch_size is not None:
        return [order[start : start + settings.batch_size] for start in range(0, count, settings.batch_size)]
    if settings.batch_tokens is None:
        raise ConfigError("a step needs batch_size or batch_tokens")
    if not settings.shuffle:
        return _next_fit(order, lengths, settings.batch_tokens)
    steps = _best_fit(order, lengths, settings.batch_tokens)
    return [steps[index] for index in permutation(len(steps), seed=seed, epoch=epoch, salt=1)]


def _next_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill one bin after the other, in order."""
    bins: list[list[int]] = []
    room = 0
    for index in order:
        if not bins or lengths[index] > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= lengths[index]
    return bins


def _best_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each index into the fullest bin that still has room for it, the oldest of equals."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in order:
        length = lengths[index]
        place = bisect.bisect_left(open_bins, (length, -1))
        if place < len(open_bins):
            room, chosen = open_bins.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        if room > length:
            bisect.insort(open_bins, (room - length, chosen))
    return bins


def split_step(step: Sequence[int], lengths: Sequence[int], settings: StepSettings) -> list[list[list[int]]]:
    """Cut a step into micro-batches of rows of examples.

    Packed: one row a micro-batch, filled best-fit-decreasing. Padded: rows of one example, neighbours in
    length together, at most micro_tokens positions with the padding.
    """
    longest_first = sorted(step, key=lambda index: (-lengths[index], index))
    if settings.pack:
        return [[row] for row in _best_fit(longest_first, lengths, settings.micro_tokens)]
    batches: list[list[list[int]]] = []
    for index in longest_first:
        if batches and lengths[batches[-1][0][0]] * (len(batches[-1]) + 1) <= settings.micro_tokens:
            batches[-1].append([index])
        else:
            batches.append([[index]])
    return batches
