"""Curricula: step streams that go from short to long, or from easy to hard examples."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.data.batches import BatchStream, Step, StepStream, check_lengths, step_batches
from whet.data.packing import StepSettings, seeded_permutation
from whet.data.tokens.examples import Example, lengths_of
from whet.errors import CheckpointError, ConfigError, DataError, check_positive

Position = dict[str, int]


class ExampleSubset(Sequence[Any]):  # Any: examples, or pairs of them
    """A subset of the examples of a sequence, by index."""

    def __init__(self, examples: Sequence[Any], indices: np.ndarray) -> None:
        self.examples = examples
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:  # Any: an example or a pair
        return self.examples[int(self.indices[index])]

    @property
    def lengths(self) -> np.ndarray:
        """The number of positions of each example in a batch."""
        return lengths_of(self.examples)[self.indices]


class StagedStream(StepStream):
    """One stream after another. Each stage has a sequence of examples and a number of steps.

    With `endless`, the last stage never ends.
    """

    def __init__(
        self,
        stages: Sequence[tuple[Sequence[Any], int]],
        settings: StepSettings,
        *,
        seed: int,
        endless: bool = True,
    ) -> None:
        if not stages:
            raise DataError("no stage of the curriculum has enough examples for a step")
        self.streams = [BatchStream(examples, settings, seed=seed) for examples, _ in stages]
        self.steps = [steps for _, steps in stages]
        self.endless = endless
        self.stage = 0
        self.done = 0  # steps of the current stage

    def __next__(self) -> Step:
        if self.done >= self.steps[self.stage]:
            if self.stage < len(self.steps) - 1:
                self.stage, self.done = self.stage + 1, 0
            elif not self.endless:
                raise StopIteration
        self.done += 1
        return next(self.streams[self.stage])

    def state(self) -> Position:
        """Return the position as integers, with a fingerprint of the stream."""
        return {"stage": self.stage, "done": self.done, **self.streams[self.stage].state()}

    def seek(self, state: Position) -> None:
        """Continue from a position that `state` returned."""
        if state["stage"] >= len(self.streams):
            raise CheckpointError("the curriculum has fewer stages than when this position was saved")
        self.stage, self.done = state["stage"], state["done"]
        self.streams[self.stage].seek(state)


def stages_by_length(
    examples: Sequence[Any], settings: StepSettings, *, shortest: int, stages: int, steps: int
) -> list[tuple[Sequence[Any], int]]:
    """Return stages whose length limit increases evenly from `shortest` to the longest example.

    A stage without enough examples for one step is left out.
    """
    lengths = lengths_of(examples)
    longest = int(lengths.max()) + 1
    selected_stages: list[tuple[Sequence[Any], int]] = []
    limits = np.linspace(min(shortest, longest), longest, stages)
    limits[-1] = longest  # also if it is the only stage
    for limit in limits:
        indices = np.flatnonzero(lengths + 1 <= limit)
        if _fills_step(lengths[indices], settings):
            selected_stages.append((ExampleSubset(examples, indices), steps))
    return selected_stages


def _fills_step(lengths: np.ndarray, settings: StepSettings) -> bool:
    if settings.batch_size is not None:
        return len(lengths) >= settings.batch_size
    return int(lengths.sum()) >= (settings.batch_tokens or 0)


class EasyToHardStream(StepStream):
    """Steps with a growing share of hard examples: none at first, all after `ramp` steps.

    `steps` is the number of steps, or None for an endless stream.
    """

    def __init__(
        self,
        easy: Sequence[Any],
        hard: Sequence[Any],
        settings: StepSettings,
        *,
        seed: int,
        ramp: int,
        steps: int | None = None,
    ) -> None:
        if not len(easy) or not len(hard):
            raise DataError("an easy-to-hard curriculum needs both easy and hard examples")
        self.pools = (_ExamplePool(easy, settings, seed=seed), _ExamplePool(hard, settings, seed=seed + 1))
        self.settings = settings
        self.ramp = ramp
        self.steps = steps
        self.step = 0
        sizes: tuple[object, ...] = (settings.batch_size, settings.batch_tokens, seed)
        if settings.order != "shuffle":  # keeps the fingerprint of older checkpoints for the default order
            sizes = (*sizes, settings.order)
        self._fingerprint = zlib.crc32(repr(sizes).encode())
        for pool in self.pools:
            self._fingerprint = zlib.crc32(pool.lengths.tobytes(), self._fingerprint)

    def hard_share(self, step: int) -> float:
        """Return the share of hard examples in a step, counted from 0."""
        return min(1.0, step / self.ramp) if self.ramp else 1.0

    def __next__(self) -> Step:
        if self.steps is not None and self.step >= self.steps:
            raise StopIteration
        share = self.hard_share(self.step)
        self.step += 1
        easy, hard = self.pools
        if self.settings.batch_size is not None:
            count = round(share * self.settings.batch_size)
            selected = [*hard.take(count), *easy.take(self.settings.batch_size - count)]
        else:
            budget = self.settings.batch_tokens or 0
            selected = hard.fill(round(share * budget)) if share else []
            remaining = budget - sum(length for _, length in selected)
            selected += easy.fill(remaining) if share < 1 else []
            if not selected:  # the next example of each pool exceeds its share
                selected = hard.take(1) if share >= 0.5 else easy.take(1)
        examples, lengths = zip(*selected, strict=True)
        return Step(step_batches(range(len(selected)), examples, np.array(lengths), self.settings))

    def state(self) -> Position:
        """Return the position as integers, with a fingerprint of the stream."""
        easy, hard = self.pools
        return {"step": self.step, "easy": easy.position, "hard": hard.position, "stream": self._fingerprint}

    def seek(self, state: Position) -> None:
        """Continue from a position that `state` returned."""
        if state["stream"] != self._fingerprint:
            raise CheckpointError("the examples or the curriculum have changed since this position was saved")
        self.step = state["step"]
        self.pools[0].position, self.pools[1].position = state["easy"], state["hard"]


class _ExamplePool:
    """An endless sequence of examples: a new permutation in each epoch, or always the order of the file."""

    def __init__(self, examples: Sequence[Any], settings: StepSettings, *, seed: int) -> None:
        self.examples = examples
        self.lengths = check_lengths(examples, settings)
        self.seed = seed
        self.in_file_order = settings.order == "sequential"
        self.position = 0
        self._planned: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> list[tuple[Any, int]]:
        """Return the next `count` examples with their lengths."""
        indices = [self._example_index(self.position + offset) for offset in range(count)]
        self.position += count
        return [(self.examples[index], int(self.lengths[index])) for index in indices]

    def fill(self, capacity: int) -> list[tuple[Any, int]]:
        """Return the next examples that fit into `capacity` positions, with their lengths."""
        selected: list[tuple[Any, int]] = []
        while (length := int(self.lengths[self._example_index(self.position)])) <= capacity:
            selected += self.take(1)
            capacity -= length
        return selected

    def _example_index(self, position: int) -> int:
        epoch, index = divmod(position, len(self.lengths))
        if self.in_file_order:
            return index
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, seeded_permutation(len(self.lengths), seed=self.seed, epoch=epoch))
        return int(self._planned[1][index])


def length_curriculum(
    tokens: Sequence[int] | np.ndarray,
    batch_size: int,
    min_seq_len: int = 32,
    max_seq_len: int = 512,
    n_stages: int = 4,
    batches_per_stage: int = 100,
    *,
    seed: int = 0,
) -> StagedStream:
    """Return steps of windows over one long text, with longer windows in each stage.

    A stage with fewer than `batch_size` windows is left out.

    Args:
        tokens: The token ids of the text.
        batch_size: Windows per step.
        min_seq_len: Window length of the first stage.
        max_seq_len: Window length of the last stage.
        n_stages: Number of stages.
        batches_per_stage: Steps per stage.
        seed: Seed of the order of the windows.

    Returns:
        A stream of at most `n_stages * batches_per_stage` steps.
    """
    check_positive(
        batch_size=batch_size,
        min_seq_len=min_seq_len,
        max_seq_len=max_seq_len,
        n_stages=n_stages,
        batches_per_stage=batches_per_stage,
    )
    if min_seq_len > max_seq_len:
        raise ConfigError(f"min_seq_len {min_seq_len} is larger than max_seq_len {max_seq_len}")
    stages: list[tuple[Sequence[Any], int]] = []
    lengths = np.linspace(min_seq_len, max_seq_len, n_stages).round().astype(int).tolist()
    for length in [*lengths[:-1], max_seq_len]:
        windows = _windows(tokens, length)
        if len(windows) >= batch_size:
            stages.append((windows, batches_per_stage))
    return StagedStream(stages, _padded_rows(batch_size, max_seq_len), seed=seed, endless=False)


def difficulty_curriculum(
    easy: Sequence[int] | np.ndarray,
    hard: Sequence[int] | np.ndarray,
    batch_size: int,
    seq_len: int,
    n_batches: int = 200,
    warmup_fraction: float = 0.5,
    *,
    seed: int = 0,
) -> EasyToHardStream:
    """Return steps of windows over an easy and a hard text, with a growing share of hard windows.

    Args:
        easy: The token ids of the easy text.
        hard: The token ids of the hard text.
        batch_size: Windows per step.
        seq_len: Window length.
        n_batches: Number of steps.
        warmup_fraction: Fraction of the steps after which all windows are hard.
        seed: Seed of the order of the windows.

    Returns:
        A stream of `n_batches` steps.
    """
    check_positive(batch_size=batch_size, seq_len=seq_len, n_batches=n_batches)
    if not 0 <= warmup_fraction <= 1:
        raise ConfigError(f"warmup_fraction {warmup_fraction} is not in [0, 1]")
    ramp = round(warmup_fraction * n_batches)
    parts = (_windows(easy, seq_len), _windows(hard, seq_len))
    return EasyToHardStream(*parts, _padded_rows(batch_size, seq_len), seed=seed, ramp=ramp, steps=n_batches)


def _padded_rows(batch_size: int, length: int) -> StepSettings:
    return StepSettings(batch_size, None, batch_size * (length + 31), pack=False, drop_last=True)


def _windows(tokens: Sequence[int] | np.ndarray, length: int) -> list[Example]:
    """Return windows of `length` inputs. Each starts with the last target of the previous window."""
    ids = np.asarray(tokens)
    mask = np.ones(length + 1, dtype=bool)
    return [
        Example(ids[start : start + length + 1], mask, f"window at {start}")
        for start in range(0, len(ids) - length, length)
    ]
