"""Batches for one forward pass, steps of several batches, and streams of steps."""

import abc
import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch

from whet.data.packing import EpochPlan, StepSettings, plan_epoch, split_step
from whet.data.tokens.examples import Example, Pair, lengths_of
from whet.errors import CheckpointError, DataError
from whet.ops.attention import Layout

IGNORE_INDEX = -100

Axis = Literal["token", "document"]


@dataclass(frozen=True)
class Column:
    """A tensor that one objective reads, with one row per supervised token or document of its batch."""

    tensor: torch.Tensor
    axis: Axis


@dataclass(frozen=True)
class Batch:
    """A micro-batch: rows of tokens and their shifted targets."""

    tokens: torch.Tensor  # [B, T]
    targets: torch.Tensor  # [B, T]; IGNORE_INDEX at unsupervised positions
    positions: torch.Tensor  # [B, T]; restarts at each document of a packed row
    supervised_positions: torch.Tensor  # [N] indices into the flattened targets, computed on the host
    documents: tuple[tuple[int, ...], ...] | None  # lengths of the documents of packed rows
    supervised: int  # N
    examples: torch.Tensor  # [N]: index of the example of each supervised position
    real_tokens: int  # number of positions that are not padding
    origins: tuple[str, ...]  # origins of the examples, for messages
    weights: torch.Tensor | None = None  # [B, T], loss weight per target; None: 1 where supervised
    real: torch.Tensor | None = None  # [B, T], bool: false for padding; None without padding
    supervised_bytes: int | None = None  # bytes of the supervised text, if they were counted
    part: str | None = None  # name of the part of a mix objective
    columns: Mapping[str, Column] = field(default_factory=dict)  # additional inputs of the objective

    def __post_init__(self) -> None:
        rows = {"token": self.supervised, "document": len(self.origins)}
        for name, column in self.columns.items():
            if len(column.tensor) != rows[column.axis]:
                raise DataError(
                    f"column {name!r} has {len(column.tensor)} rows, but the batch has {rows[column.axis]} "
                    f"{'supervised tokens' if column.axis == 'token' else 'documents'}"
                )

    @property
    def supervised_targets(self) -> torch.Tensor:
        """The target tokens at the supervised positions, [N]."""
        return self.targets.flatten().index_select(0, self.supervised_positions)

    @property
    def supervised_weights(self) -> torch.Tensor | None:
        """The loss weights at the supervised positions, [N], or None if all are 1."""
        if self.weights is None:
            return None
        return self.weights.flatten().index_select(0, self.supervised_positions)

    def column(self, name: str) -> torch.Tensor:
        """Return the tensor of a column, [N, ...] or [documents, ...]."""
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise DataError(f"{self.origins[0]}: the batch has no column {name!r} (its columns: {known})")
        return self.columns[name].tensor

    def with_columns(self, axis: Axis, **tensors: torch.Tensor | None) -> Self:
        """Return the batch with additional columns; None values are left out."""
        added = {name: Column(tensor, axis) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, columns={**self.columns, **added})

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device. Copies to a GPU are asynchronous."""
        pin = device.type == "cuda" and not self.tokens.is_cuda

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)

        moved: dict[str, Any] = {  # Any: replace() does not know that only tensor fields change
            name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        columns = {name: Column(move(column.tensor), column.axis) for name, column in self.columns.items()}
        return replace(self, **moved, columns=columns)

    def layout(self) -> Layout:
        """Return the attention layout: which positions attend to each other."""
        if self.documents is None:
            return Layout()
        return Layout.packed(self.documents, device=self.tokens.device)


def make_batch(
    rows: Sequence[Sequence[Example]], *, width: int | None = None, token_bytes: np.ndarray | None = None
) -> Batch:
    """Return one batch from rows of examples.

    Args:
        rows: Rows of one example (padded) or of several examples (packed).
        width: Minimum width of the rows; they are at least as wide as the longest row.
        token_bytes: Bytes per token id, to count the bytes of the supervised text.
    """
    width = max(width or 0, *(sum(example.length for example in row) for row in rows))
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    example_index = np.zeros((len(rows), width), dtype=np.int64)
    is_filled = np.zeros((len(rows), width), dtype=np.bool_)
    weights = np.zeros((len(rows), width), dtype=np.float32) if _has_weights(rows) else None
    documents = []
    real_tokens = count = 0
    for index, row in enumerate(rows):
        end = 0
        for example in row:
            start, end = end, end + example.length
            example_index[index, start:end] = count
            count += 1
            ids = np.asarray(example.tokens, dtype=np.int64)  # signed, because IGNORE_INDEX is negative
            tokens[index, start:end] = ids[:-1]
            targets[index, start:end] = np.where(example.supervised[1:], ids[1:], IGNORE_INDEX)
            positions[index, start:end] = np.arange(end - start)
            if weights is not None:
                values = example.supervised if example.weights is None else example.weights
                weights[index, start:end] = np.asarray(values, dtype=np.float32)[1:]
        positions[index, end:] = np.arange(width - end)
        is_filled[index, :end] = True
        padding = (width - end,) if end < width else ()
        documents.append(tuple(example.length for example in row) + padding)
        real_tokens += end
    supervised = np.flatnonzero(targets != IGNORE_INDEX)
    packed = any(len(row) > 1 for row in rows)
    examples = [example for row in rows for example in row]
    teacher_ids, teacher_logprobs = _teacher_columns(examples)
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        supervised_positions=torch.from_numpy(supervised),
        documents=tuple(documents) if packed else None,
        supervised=len(supervised),
        examples=torch.from_numpy(example_index.flat[supervised]),
        real_tokens=real_tokens,
        origins=tuple(example.origin for example in examples),
        weights=None if weights is None else torch.from_numpy(weights),
        real=None if is_filled.all() else torch.from_numpy(is_filled),
        supervised_bytes=None if token_bytes is None else int(token_bytes[targets.flat[supervised]].sum()),
    )
    batch = batch.with_columns("document", values=_value_column(examples))
    return batch.with_columns("token", teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs)


def _has_weights(rows: Sequence[Sequence[Example]]) -> bool:
    return any(example.weights is not None for row in rows for example in row)


def _value_column(examples: Sequence[Example]) -> torch.Tensor | None:
    """Return the numeric columns of the examples, [examples, columns]."""
    if not examples[0].values:
        return None
    return torch.tensor([example.values for example in examples], dtype=torch.float32)


def _teacher_columns(examples: Sequence[Example]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the top-k tokens per teacher, [N, teachers, k], and their log-probabilities, [N, teachers, k+1].

    The last log-probability is that of all other tokens combined.
    """
    if not examples[0].teacher_targets:
        return None, None
    ids = np.concatenate([np.stack([t.ids for t in example.teacher_targets], 1) for example in examples])
    logprobs = np.concatenate(
        [np.stack([t.logprobs for t in example.teacher_targets], 1) for example in examples]
    )
    return torch.from_numpy(ids), torch.from_numpy(logprobs)


@dataclass(frozen=True)
class Step(Sequence[Batch]):
    """The micro-batches of one optimizer update, with the metrics known before it."""

    batches: Sequence[Batch]
    metrics: Mapping[str, Any] = field(default_factory=dict)  # for metrics.jsonl; Any: JSON values
    samples: Sequence[Mapping[str, Any]] = ()  # for samples.jsonl; Any: JSON values

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:  # Any: one batch for an index, several for a slice
        return self.batches[index]


class StepStream(abc.ABC):
    """Steps in an order that is saved with checkpoints and continued on resume."""

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> Step:
        """Return the next step."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the position, for `seek`."""

    @abc.abstractmethod
    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Continue from a position that `state` returned."""

    def steps_in(self, epoch: int) -> int | None:
        """Return the number of steps in an epoch, or None if epochs are not counted."""
        return None

    def peek(self) -> Step:
        """Return the next step without advancing."""
        before = self.state()
        try:
            return next(self)
        finally:
            self.seek(before)

    def can_prefetch(self) -> bool:
        """Return whether the next step may be drawn before the metrics of this step are known."""
        return True

    def close(self) -> None:  # noqa: B027
        """End the threads and close the files that the stream uses; called at the end of a run."""

    def after_update(self, step: Step, number: int, metrics: Mapping[str, Any]) -> None:  # noqa: B027
        """Process the metrics of a completed step. Any: JSON values."""


class IteratorStream(StepStream):
    """Steps from any iterable of lists of micro-batches, which may end.

    Its position is the number of steps drawn. A resumed run skips as many steps of a fresh iterable. It can
    go back two steps, because a trainer may undo a prefetched step and the step before it.
    """

    def __init__(self, batches: Iterable[Sequence[Batch]]) -> None:
        self._batches = iter(batches)
        self._drawn = 0
        self._recent: deque[Step] = deque(maxlen=2)
        self._put_back: deque[Step] = deque()  # steps to return again

    def __next__(self) -> Step:
        step = self._put_back.popleft() if self._put_back else self._read()
        self._recent.append(step)
        self._drawn += 1
        return step

    def _read(self) -> Step:
        batches = next(self._batches)
        return batches if isinstance(batches, Step) else Step(batches)

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the number of steps drawn."""
        return {"taken": self._drawn}

    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Skip steps up to `state`, or put back the most recent ones."""
        target = state.get("taken", self._drawn)  # older checkpoints have no iterator position
        while self._drawn > target:
            if not self._recent:
                raise CheckpointError(
                    f"{self._drawn} steps were drawn from this iterator, but the checkpoint is at {target}",
                    hint="restore into a trainer with a fresh iterator",
                )
            self._put_back.appendleft(self._recent.pop())
            self._drawn -= 1
        while self._drawn < target:
            try:
                next(self)
            except StopIteration:
                raise CheckpointError(
                    f"the data ends after {self._drawn} steps, but the checkpoint is at {target}"
                ) from None


class BatchStream(StepStream):
    """An endless stream of optimizer steps, each a list of micro-batches.

    The order is a pure function of (seed, epoch, step in the epoch), so two integers are its complete state.

    Args:
        examples: The examples, or pairs of them.
        settings: The size and order of the steps.
        seed: Seed of the order.
    """

    def __init__(
        self, examples: Sequence[Example] | Sequence[Pair], settings: StepSettings, *, seed: int
    ) -> None:
        self.examples = examples
        self.settings = settings
        self.seed = seed
        self.epoch = 0
        self.index = 0
        self._planned: tuple[int, EpochPlan] | None = None
        self._lengths = self._example_lengths()
        steps = (settings.batch_size, settings.batch_tokens, settings.pack, settings.order)
        self._fingerprint = zlib.crc32(repr((steps, seed)).encode(), zlib.crc32(self._lengths.tobytes()))

    def steps_in(self, epoch: int) -> int:
        """Return the number of optimizer steps in an epoch."""
        return len(self._plan(epoch))

    def state(self) -> dict[str, int]:
        """Return the position as integers, with a fingerprint of the stream."""
        return {"epoch": self.epoch, "index": self.index, "stream": self._fingerprint}

    def seek(self, state: dict[str, int]) -> None:
        """Continue from a position of a stream with the same examples, steps and seed."""
        if state["stream"] != self._fingerprint:
            raise CheckpointError(
                "the examples, their order or the step size have changed since this position was saved",
                hint="restore data, run.seed, run.batch_size and run.batch_tokens, or start a new run",
            )
        self.epoch, self.index = state["epoch"], state["index"]

    def __next__(self) -> Step:
        step = self._plan(self.epoch)[self.index]
        self.index += 1
        if self.index == len(self._plan(self.epoch)):
            self.epoch, self.index = self.epoch + 1, 0
        return Step(self._make_batches(step))

    def _example_lengths(self) -> np.ndarray:
        return check_lengths(self.examples, self.settings)

    def _make_batches(self, step: Sequence[int]) -> list[Batch]:
        return step_batches(step, self.examples, self._lengths, self.settings)

    def _plan(self, epoch: int) -> EpochPlan:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, plan_epoch(self._lengths, self.settings, seed=self.seed, epoch=epoch))
        return self._planned[1]


def check_lengths(examples: Sequence[Example] | Sequence[Pair], settings: StepSettings) -> np.ndarray:
    """Return the lengths of the examples, after checking that all fit a micro-batch and a step."""
    lengths = lengths_of(examples)
    longest = int(lengths.argmax())
    texts = members(examples[longest])
    settings.check(int(lengths[longest]), texts[0].origin, texts=len(texts))
    return lengths


def step_batches(
    step: Sequence[int],
    examples: Sequence[Example] | Sequence[Pair],
    lengths: np.ndarray,
    settings: StepSettings,
    *,
    token_bytes: np.ndarray | None = None,
) -> list[Batch]:
    """Return the micro-batches of a step."""
    return [
        batch_from_rows(rows, examples, settings, token_bytes=token_bytes)
        for rows in split_step(step, lengths, settings)
    ]


def batch_from_rows(
    rows: Sequence[Sequence[int]],
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    token_bytes: np.ndarray | None = None,
) -> Batch:
    """Return one of the micro-batches that `split_step` planned."""
    packed_rows = [[example for index in row for example in members(examples[index])] for row in rows]
    if settings.pack:
        return make_batch(packed_rows, token_bytes=token_bytes)
    single_rows = [[example] for row in packed_rows for example in row]  # one row per example
    sides = len(packed_rows[0])  # examples of an item: 2 for pairs, which are planned together
    width = settings.padded(sides * max(row[0].length for row in single_rows)) // sides
    return make_batch(single_rows, width=width, token_bytes=token_bytes)


def members(item: Example | Pair) -> tuple[Example, ...]:
    """Return the examples of an item: one, or both of a pair."""
    return (item,) if isinstance(item, Example) else item


def iter_batches_once(
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    token_bytes: np.ndarray | None = None,
) -> Iterator[tuple[list[int], Batch]]:
    """Yield every example once, in micro-batches with the indices of their examples."""
    one_batch = replace(settings, batch_size=None, batch_tokens=settings.micro_tokens, order="sequential")
    lengths = check_lengths(examples, one_batch)
    for group in plan_epoch(lengths, one_batch, seed=0, epoch=0):
        for rows in split_step(group, lengths, one_batch):
            indices = [index for row in rows for index in row]
            yield indices, batch_from_rows(rows, examples, one_batch, token_bytes=token_bytes)


def evaluation_batches(
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    limit: int | None = None,
    token_bytes: np.ndarray | None = None,
) -> list[Batch]:
    """Return the micro-batches of one pass over the examples, in order.

    Args:
        examples: The examples, or pairs of them.
        settings: Sizes of micro-batches, and whether to pack.
        limit: Maximum number of micro-batches, or None for all.
        token_bytes: Bytes per token id, to count the bytes of the supervised text.
    """
    batches = (batch for _, batch in iter_batches_once(examples, settings, token_bytes=token_bytes))
    return list(itertools.islice(batches, limit))
