"""Curricula: streams of steps that go from short to long, or from easy to hard."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.data.batches import BatchStream, Step, StepStream, check_lengths, step_batches
from whet.data.packing import StepSettings, permutation
from whet.data.tokens.examples import Example, lengths_of
from whet.errors import CheckpointError, ConfigError, DataError, check_positive

Position = dict[str, int]


class Chosen(Sequence[Any]):  # Any: examples, or pairs of them
    """Some of the examples of a sequence."""

    def __init__(self, examples: Sequence[Any], places: np.ndarray) -> None:
        self.examples = examples
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:  # Any: an example or a pair
        return self.examples[int(self.places[index])]

    @property
    def lengths(self) -> np.ndarray:
        """Positions that each example takes in a batch."""
        return lengths_of(self.examples)[self.places]


class StagedStream(StepStream):
    """One stream after another: each stage has its examples and its number of steps.

    With `endless`, the last stage has no end.
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
        self.done = 0  # steps of the stage

    def __next__(self) -> Step:
        if self.done >= self.steps[self.stage]:
            if self.stage < len(self.steps) - 1:
                self.stage, self.done = self.stage + 1, 0
            elif not self.endless:
                raise StopIteration
        self.done += 1
        return next(self.streams[self.stage])

    def state(self) -> Position:
        """The position, as integers, and a mark of what it is a position in."""
        return {"stage": self.stage, "done": self.done, **self.streams[self.stage].state()}

    def seek(self, state: Position) -> None:
        """Go to a position that `state` returned."""
        if state["stage"] >= len(self.streams):
            raise CheckpointError("the curriculum has fewer stages than when this position was saved")
        self.stage, self.done = state["stage"], state["done"]
        self.streams[self.stage].seek(state)


def stages_by_length(
    examples: Sequence[Any], settings: StepSettings, *, shortest: int, stages: int, steps: int
) -> list[tuple[Sequence[Any], int]]:
    """Limits that rise evenly from `shortest` to the longest; a stage without a whole step is left out."""
    lengths = lengths_of(examples)
    longest = int(lengths.max()) + 1
    found: list[tuple[Sequence[Any], int]] = []
    limits = np.linspace(min(shortest, longest), longest, stages)
    limits[-1] = longest  # also where it is the only one
    for limit in limits:
        places = np.flatnonzero(lengths + 1 <= limit)
        if _fills_a_step(lengths[places], settings):
            found.append((Chosen(examples, places), steps))
    return found


def _fills_a_step(lengths: np.ndarray, settings: StepSettings) -> bool:
    if settings.batch_size is not None:
        return len(lengths) >= settings.batch_size
    return int(lengths.sum()) >= (settings.batch_tokens or 0)


class EasyToHardStream(StepStream):
    """Steps of which a growing share is hard: none at first, all of it from `ramp` steps on.

    `steps`: how many there are; None: no end.
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
            raise DataError("a curriculum from easy to hard needs examples of both kinds")
        self.pools = (_Pool(easy, settings, seed=seed), _Pool(hard, settings, seed=seed + 1))
        self.settings = settings
        self.ramp = ramp
        self.steps = steps
        self.step = 0
        sizes: tuple[object, ...] = (settings.batch_size, settings.batch_tokens, seed)
        if settings.order != "shuffle":  # the usual order has the mark that it always had
            sizes = (*sizes, settings.order)
        self._mark = zlib.crc32(repr(sizes).encode())
        for pool in self.pools:
            self._mark = zlib.crc32(pool.lengths.tobytes(), self._mark)

    def hard_share(self, step: int) -> float:
        """Of the step with this number, counted from 0."""
        return min(1.0, step / self.ramp) if self.ramp else 1.0

    def __next__(self) -> Step:
        if self.steps is not None and self.step >= self.steps:
            raise StopIteration
        share = self.hard_share(self.step)
        self.step += 1
        easy, hard = self.pools
        if self.settings.batch_size is not None:
            count = round(share * self.settings.batch_size)
            chosen = [*hard.take(count), *easy.take(self.settings.batch_size - count)]
        else:
            budget = self.settings.batch_tokens or 0
            chosen = hard.fill(round(share * budget)) if share else []
            room = budget - sum(length for _, length in chosen)
            chosen += easy.fill(room) if share < 1 else []
            if not chosen:  # the next of both is longer than its share
                chosen = hard.take(1) if share >= 0.5 else easy.take(1)
        examples, lengths = zip(*chosen, strict=True)
        return Step(step_batches(range(len(chosen)), examples, np.array(lengths), self.settings))

    def state(self) -> Position:
        """The position, as integers, and a mark of what it is a position in."""
        easy, hard = self.pools
        return {"step": self.step, "easy": easy.position, "hard": hard.position, "stream": self._mark}

    def seek(self, state: Position) -> None:
        """Go to a position that `state` returned."""
        if state["stream"] != self._mark:
            raise CheckpointError("the examples or the curriculum have changed since this position was saved")
        self.step = state["step"]
        self.pools[0].position, self.pools[1].position = state["easy"], state["hard"]


class _Pool:
    """Examples in an order without end: a new permutation each time around, or always that of the file."""

    def __init__(self, examples: Sequence[Any], settings: StepSettings, *, seed: int) -> None:
        self.examples = examples
        self.lengths = check_lengths(examples, settings)
        self.seed = seed
        self.in_file_order = settings.order == "sequential"
        self.position = 0
        self._planned: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> list[tuple[Any, int]]:
        """The next so many examples, and the positions each takes."""
        places = [self._place(self.position + ahead) for ahead in range(count)]
        self.position += count
        return [(self.examples[place], int(self.lengths[place])) for place in places]

    def fill(self, room: int) -> list[tuple[Any, int]]:
        """The next examples, while they fit."""
        found: list[tuple[Any, int]] = []
        while (length := int(self.lengths[self._place(self.position)])) <= room:
            found += self.take(1)
            room -= length
        return found

    def _place(self, position: int) -> int:
        epoch, index = divmod(position, len(self.lengths))
        if self.in_file_order:
            return index
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, permutation(len(self.lengths), seed=self.seed, epoch=epoch))
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
    """Return `n_stages` times `batches_per_stage` steps of `batch_size` windows, longer from stage to stage.

    The windows are cut from one long text. A stage for which it has fewer than `batch_size` is left out.
    """
    check_positive(
        batch_size=batch_size,
        min_seq_len=min_seq_len,
        max_seq_len=max_seq_len,
        n_stages=n_stages,
        batches_per_stage=batches_per_stage,
    )
    if min_seq_len > max_seq_len:
        raise ConfigError(f"min_seq_len {min_seq_len} is above max_seq_len, which is {max_seq_len}")
    stages: list[tuple[Sequence[Any], int]] = []
    lengths = np.linspace(min_seq_len, max_seq_len, n_stages).round().astype(int).tolist()
    for length in [*lengths[:-1], max_seq_len]:
        windows = _windows(tokens, length)
        if len(windows) >= batch_size:
            stages.append((windows, batches_per_stage))
    return StagedStream(stages, _rows(batch_size, max_seq_len), seed=seed, endless=False)


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
    """Return `n_batches` steps of `batch_size` windows of two texts; after the warm-up all are hard."""
    check_positive(batch_size=batch_size, seq_len=seq_len, n_batches=n_batches)
    if not 0 <= warmup_fraction <= 1:
        raise ConfigError(f"warmup_fraction {warmup_fraction} is not in [0, 1]")
    ramp = round(warmup_fraction * n_batches)
    parts = (_windows(easy, seq_len), _windows(hard, seq_len))
    return EasyToHardStream(*parts, _rows(batch_size, seq_len), seed=seed, ramp=ramp, steps=n_batches)


def _rows(batch_size: int, length: int) -> StepSettings:
    return StepSettings(batch_size, None, batch_size * (length + 31), pack=False, drop_last=True)


def _windows(tokens: Sequence[int] | np.ndarray, length: int) -> list[Example]:
    """Windows of `length` inputs; each starts with the last target of the one before."""
    ids = np.asarray(tokens)
    marks = np.ones(length + 1, dtype=bool)
    return [
        Example(ids[start : start + length + 1], marks, f"window at {start}")
        for start in range(0, len(ids) - length, length)
    ]
