"""Plan epochs and micro-batches. All functions are pure functions of lengths and seeds."""

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whet.errors import ConfigError, DataError

Order = Literal["shuffle", "sequential", "mlx"]
DEFAULT_MICRO_BATCH_TOKENS = 4096
PAD_TO = 32  # the width of padded rows is a multiple of this, so that kernels and compilers see few shapes


@dataclass(frozen=True)
class StepSettings:
    """The size of a step (`batch_size` or `batch_tokens`) and of its micro-batches.

    Args:
        batch_size: Examples per step, or None.
        batch_tokens: Maximum number of tokens per step, or None.
        micro_batch_tokens: Maximum number of positions per micro-batch, padding included.
        pack: Whether several examples share a row; otherwise rows are padded.
        order: The order of the examples in an epoch.
        drop_last: Whether to leave out the examples of an epoch that do not fill a step of `batch_size`.
    """

    batch_size: int | None
    batch_tokens: int | None
    micro_batch_tokens: int | None
    pack: bool
    order: Order = "shuffle"
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.order == "mlx" and (self.pack or self.batch_size is None):
            raise ConfigError("data.order: mlx needs run.batch_size and data.pack: false")

    @property
    def micro_tokens(self) -> int:
        """Maximum number of positions in a micro-batch, padding included."""
        return self.micro_batch_tokens or min(
            self.batch_tokens or DEFAULT_MICRO_BATCH_TOKENS, DEFAULT_MICRO_BATCH_TOKENS
        )

    def padded(self, length: int) -> int:
        """Return the width of a row whose longest example has `length` positions."""
        if self.pack:
            return length
        # mlx-lm also counts the last token, which is only a target
        width = -(-(length + (self.order == "mlx")) // PAD_TO) * PAD_TO
        return max(length, min(width, self.micro_tokens))

    def check(self, longest: int, origin: str, *, texts: int = 1) -> None:
        """Raise a DataError if an example does not fit into a micro-batch or a step.

        Args:
            longest: The positions of the example.
            origin: The origin of the example, for the message.
            texts: The number of texts in the example, each limited by data.max_length; 0 for no limit.
        """
        for key, limit in (("batch_tokens", self.batch_tokens), ("micro_batch_tokens", self.micro_tokens)):
            if limit is not None and longest > limit:
                # the last token of a text is only a target and has no position
                max_length = limit // texts + 1 if texts else 0
                alternative = f", or lower data.max_length to {max_length}" if max_length > 1 else ""
                raise DataError(
                    f"{origin}: {longest + 1} tokens do not fit run.{key}={limit}",
                    hint=f"raise run.{key}{alternative}",
                )


class EpochPlan:
    """The steps of one epoch: indices of examples, and the end of each step within them."""

    def __init__(self, indices: np.ndarray, ends: np.ndarray) -> None:
        self.indices = indices
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, step: int) -> list[int]:
        start = self.ends[step - 1] if step else 0
        examples: list[int] = self.indices[start : self.ends[step]].tolist()
        return examples

    def __iter__(self) -> Iterator[list[int]]:
        return (self[step] for step in range(len(self)))


def plan_epoch(
    lengths: Sequence[int] | np.ndarray, settings: StepSettings, *, seed: int, epoch: int
) -> EpochPlan:
    """Return the steps of one epoch. Every example appears exactly once, except that `mlx` drops the tail.

    Packed steps contain random examples. Padded steps contain examples of similar length, to reduce padding,
    in random order. Steps do not depend on micro_batch_tokens, which affects memory but not the result.
    """
    lengths = np.asarray(lengths)
    match settings.order:
        case "sequential":
            return _fill_in_order(np.arange(len(lengths)), lengths, settings)
        case "mlx":
            return _plan_mlx(lengths, settings, seed=seed + epoch)
    order = seeded_permutation(len(lengths), seed=seed, epoch=epoch)
    if settings.pack and settings.batch_tokens is not None:
        plan = _pack_best_fit(order, lengths, settings.batch_tokens)
    elif settings.pack:
        return _fill_in_order(order, lengths, settings)
    else:
        # equal lengths stay in random order, so that groups differ between epochs
        plan = _fill_in_order(order[np.argsort(lengths[order], kind="stable")], lengths, settings)
    return _reorder_steps(plan, seeded_permutation(len(plan), seed=seed, epoch=epoch, salt=1))


def plan_block(
    lengths: np.ndarray, settings: StepSettings, *, carried: int, seed: int, block: int
) -> tuple[EpochPlan, np.ndarray]:
    """Return the steps of one block of a stream, and the examples that are left for the next block.

    What does not fill a step is left over, so that every step of a stream is as full as packing makes it. The
    carried examples are in the first step that is planned, so none is left over forever.

    Args:
        lengths: The positions of each example. The first `carried` ones were left over by the last block.
        settings: The size and order of the steps.
        carried: The number of carried examples.
        seed: Seed of the order.
        block: The number of the block, from 0.
    """
    shuffled = carried + seeded_permutation(len(lengths) - carried, seed=seed, epoch=block)
    order = np.concatenate([np.arange(carried), shuffled])
    if settings.order == "sequential":
        order = np.arange(len(lengths))
    if settings.batch_size is not None:
        order, rest = np.split(order, [len(order) // settings.batch_size * settings.batch_size])
        if settings.order == "shuffle" and not settings.pack:
            order = order[np.argsort(lengths[order], kind="stable")]
        plan = _fill_in_order(order, lengths, settings)
    else:
        plan, rest = _plan_full_steps(order, lengths, settings, from_longest=block % 2 == 1)
    if settings.order == "sequential" or (settings.pack and settings.batch_size is not None):
        return plan, rest
    return _reorder_steps(plan, seeded_permutation(len(plan), seed=seed, epoch=block, salt=1)), rest


def _plan_full_steps(
    order: np.ndarray, lengths: np.ndarray, settings: StepSettings, *, from_longest: bool
) -> tuple[EpochPlan, np.ndarray]:
    """Plan steps of batch_tokens, and leave out the emptiest of them, or the last one of a fixed order."""
    capacity = settings.batch_tokens or 0
    if not len(order):
        return EpochPlan(order, order), order
    if settings.order == "sequential":
        plan = _fill_in_order(order, lengths, settings)
        left_out = len(plan) - 1
    elif settings.pack:
        plan = _pack_best_fit(order, lengths, capacity)
        fill = np.array([lengths[step].sum() for step in plan])
        # the first step has the carried examples, and goes first if there are others
        left_out = len(fill) - 1 - int(fill[:0:-1].argmin()) if len(fill) > 1 else 0
    else:
        # from the other end in each block: the last step of a block has the first examples of the next
        by_length = order[np.argsort(-lengths[order] if from_longest else lengths[order], kind="stable")]
        plan = _fill_in_order(by_length, lengths, settings)
        left_out = len(plan) - 1
    if lengths[plan[left_out]].sum() == capacity:
        return plan, order[:0]
    steps = np.delete(np.arange(len(plan)), left_out)
    return _reorder_steps(plan, steps), np.array(plan[left_out], dtype=np.int64)


def _fill_in_order(order: np.ndarray, lengths: np.ndarray, settings: StepSettings) -> EpochPlan:
    """Fill one step after the other."""
    if settings.batch_size is not None and settings.drop_last:
        order = order[: len(order) // settings.batch_size * settings.batch_size]
    if settings.batch_size is not None:
        ends = np.arange(settings.batch_size, len(order) + settings.batch_size, settings.batch_size)
        return EpochPlan(order, np.minimum(ends, len(order)))
    if settings.batch_tokens is None:
        raise ConfigError("a step needs batch_size or batch_tokens")
    step_ends: list[int] = []
    remaining = settings.batch_tokens
    for index, length in enumerate(lengths[order].tolist()):
        if length > remaining and index:
            step_ends.append(index)
            remaining = settings.batch_tokens
        remaining -= length
    return EpochPlan(order, np.array([*step_ends, len(order)]))


def _pack_best_fit(order: np.ndarray, lengths: np.ndarray, capacity: int) -> EpochPlan:
    """Put each example into the fullest step that can hold it; the oldest step wins ties."""
    step_of_example: list[int] = []
    capacities: list[int] = []  # distinct remaining capacities of open steps, sorted
    open_steps: dict[int, list[int]] = {}  # remaining capacity -> heap of open steps
    count = 0
    for length in lengths[order].tolist():
        position = bisect.bisect_left(capacities, length)
        if position < len(capacities):
            capacity_left = capacities[position]
            step = heapq.heappop(open_steps[capacity_left])
            if not open_steps[capacity_left]:
                del capacities[position]
        else:
            capacity_left, step = capacity, count
            count += 1
        step_of_example.append(step)
        if (remainder := capacity_left - length) > 0:
            heap = open_steps.setdefault(remainder, [])
            if not heap:
                bisect.insort(capacities, remainder)
            heapq.heappush(heap, step)
    step_indices = np.array(step_of_example, dtype=np.int64)
    return EpochPlan(order[np.argsort(step_indices, kind="stable")], np.cumsum(np.bincount(step_indices)))


def _plan_mlx(lengths: np.ndarray, settings: StepSettings, *, seed: int) -> EpochPlan:
    """Plan batches like mlx-lm: sort by length, split into batches, shuffle these, drop the remainder."""
    size = settings.batch_size or 1
    groups = len(lengths) // size
    if not groups:
        raise DataError(f"{len(lengths)} examples do not fill one batch of {size}")
    order = np.argsort(lengths, kind="stable")[: groups * size]
    return _reorder_steps(
        EpochPlan(order, np.arange(size, groups * size + 1, size)), fisher_yates(groups, seed=seed)
    )


def _reorder_steps(plan: EpochPlan, order: np.ndarray) -> EpochPlan:
    """Return the same steps in another order; steps that it does not name are left out."""
    starts = np.concatenate(([0], plan.ends[:-1]))
    sizes = (plan.ends - starts)[order]
    ends = np.cumsum(sizes)
    # for each new position: the old start of its step, and the offset within the step
    offsets = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    return EpochPlan(plan.indices[np.repeat(starts[order], sizes) + offsets], ends)


def seeded_permutation(count: int, *, seed: int, epoch: int, salt: int = 0) -> np.ndarray:
    """Return a permutation of range(count) that is the same on every platform (sorted SplitMix64 outputs)."""
    start = _mix(_mix(_mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) ^ np.uint64(epoch)) ^ np.uint64(salt))
    with np.errstate(over="ignore"):
        keys = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN_GAMMA)
    return np.argsort(keys, kind="stable")


def fisher_yates(count: int, *, seed: int) -> np.ndarray:
    """Return a Fisher-Yates shuffle of range(count), drawn from SplitMix64 modulo the remaining count."""
    with np.errstate(over="ignore"):
        draws = _mix(
            np.uint64(seed & 0xFFFFFFFFFFFFFFFF) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN_GAMMA
        )
    order = list(range(count))
    for last, draw in zip(range(count - 1, 0, -1), draws.tolist(), strict=False):
        swapped = draw % (last + 1)
        order[last], order[swapped] = order[swapped], order[last]
    return np.array(order, dtype=np.int64)


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """Apply SplitMix64's output function to one or many integers."""
    z = np.asarray(value, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def split_step(
    step: Sequence[int], lengths: Sequence[int] | np.ndarray, settings: StepSettings
) -> list[list[list[int]]]:
    """Split a step into micro-batches, each a list of rows of example indices.

    With packing, each micro-batch is one row, filled best-fit-decreasing. Without packing, each row is one
    example, and examples of similar length share a micro-batch of at most micro_tokens positions.
    """
    longest_first = sorted(step, key=lambda index: (-lengths[index], index))
    if settings.pack:
        plan = _pack_best_fit(np.array(longest_first), np.asarray(lengths), settings.micro_tokens)
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
