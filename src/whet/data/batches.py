"""Batches, what one forward pass takes; steps, the batches of one update; and streams of steps."""

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

IGNORED = -100

Axis = Literal["token", "document"]


@dataclass(frozen=True)
class Column:
    """A tensor that one objective reads, with a row for each supervised token or document of its batch."""

    tensor: torch.Tensor
    axis: Axis


@dataclass(frozen=True)
class Batch:
    """A micro-batch: rows of tokens and, already shifted, what each position should predict."""

    tokens: torch.Tensor  # [B, T]
    targets: torch.Tensor  # [B, T]; IGNORED where nothing is learned
    positions: torch.Tensor  # [B, T]; restarted for each document of a packed row
    supervised_positions: torch.Tensor  # [N] into the flattened targets: found on the host, without a sync
    documents: tuple[tuple[int, ...], ...] | None  # packed rows: the lengths of their documents
    supervised: int  # N
    examples: torch.Tensor  # [N]: which of the batch's examples each supervised position belongs to
    real_tokens: int  # positions that are not padding
    origins: tuple[str, ...]  # where its examples came from
    weights: torch.Tensor | None = None  # [B, T], per-token weights of the loss
    real: torch.Tensor | None = None  # [B, T], bool: what is not padding; None: everything
    supervised_bytes: int | None = None  # length of the supervised text, where the tokenizer was asked
    part: str | None = None  # of a mix: whose batch it is
    columns: Mapping[str, Column] = field(default_factory=dict)  # what its objective reads besides

    def __post_init__(self) -> None:
        rows = {"token": self.supervised, "document": len(self.origins)}
        for name, column in self.columns.items():
            if len(column.tensor) != rows[column.axis]:
                raise DataError(
                    f"column {name!r} has {len(column.tensor)} rows, and the batch has {rows[column.axis]} "
                    f"{'supervised tokens' if column.axis == 'token' else 'documents'}"
                )

    @property
    def supervised_targets(self) -> torch.Tensor:
        """The tokens to predict at the supervised positions, [N]."""
        return self.targets.flatten().index_select(0, self.supervised_positions)

    @property
    def supervised_weights(self) -> torch.Tensor | None:
        """The weights of the loss at the supervised positions, [N], or None where all are 1."""
        if self.weights is None:
            return None
        return self.weights.flatten().index_select(0, self.supervised_positions)

    def column(self, name: str) -> torch.Tensor:
        """Return a column's tensor, [N, ...] or [documents, ...]."""
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise DataError(f"{self.origins[0]}: the batch has no column {name!r} (it has {known})")
        return self.columns[name].tensor

    def with_columns(self, axis: Axis, **tensors: torch.Tensor | None) -> Self:
        """Return the batch with more columns; those that are None are left out."""
        more = {name: Column(tensor, axis) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, columns={**self.columns, **more})

    def to(self, device: torch.device) -> Self:
        """The same batch on a device; a GPU's host does not wait for the copy."""
        pin = device.type == "cuda" and not self.tokens.is_cuda

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)

        moved: dict[str, Any] = {  # Any: replace() cannot see that only tensor fields change
            name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        columns = {name: Column(move(column.tensor), column.axis) for name, column in self.columns.items()}
        return replace(self, **moved, columns=columns)

    def layout(self) -> Layout:
        """Which positions see which."""
        if self.documents is None:
            return Layout()
        return Layout.packed(self.documents, device=self.tokens.device)


def make_batch(
    rows: Sequence[Sequence[Example]], *, width: int | None = None, token_bytes: np.ndarray | None = None
) -> Batch:
    """Rows of one example (padded to the longest, or to `width`) or of several (packed) as one batch."""
    width = max(width or 0, *(sum(example.length for example in row) for row in rows))
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.full((len(rows), width), IGNORED, dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    owner = np.zeros((len(rows), width), dtype=np.int64)
    filled = np.zeros((len(rows), width), dtype=np.bool_)
    documents = []
    real = count = 0
    for index, row in enumerate(rows):
        end = 0
        for example in row:
            start, end = end, end + example.length
            owner[index, start:end] = count
            count += 1
            ids = np.asarray(example.tokens, dtype=np.int64)  # signed: IGNORED is negative
            tokens[index, start:end] = ids[:-1]
            targets[index, start:end] = np.where(example.supervised[1:], ids[1:], IGNORED)
            positions[index, start:end] = np.arange(end - start)
        positions[index, end:] = np.arange(width - end)
        filled[index, :end] = True
        padding = (width - end,) if end < width else ()
        documents.append(tuple(example.length for example in row) + padding)
        real += end
    chosen = np.flatnonzero(targets != IGNORED)
    packed = any(len(row) > 1 for row in rows)
    examples = [example for row in rows for example in row]
    taught_ids, taught_logprobs = _taught(examples)
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        supervised_positions=torch.from_numpy(chosen),
        documents=tuple(documents) if packed else None,
        supervised=len(chosen),
        examples=torch.from_numpy(owner.flat[chosen]),
        real_tokens=real,
        origins=tuple(example.origin for example in examples),
        real=None if filled.all() else torch.from_numpy(filled),
        supervised_bytes=None if token_bytes is None else int(token_bytes[targets.flat[chosen]].sum()),
    )
    batch = batch.with_columns("document", values=_values(examples))
    return batch.with_columns("token", taught_ids=taught_ids, taught_logprobs=taught_logprobs)


def _values(examples: Sequence[Example]) -> torch.Tensor | None:
    """The numbers that came with each example, [examples, columns]."""
    if not examples[0].values:
        return None
    return torch.tensor([example.values for example in examples], dtype=torch.float32)


def _taught(examples: Sequence[Example]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The likeliest tokens of each teacher [N, teachers, k], and their log-probabilities [N, teachers, k+1].

    The last log-probability is that of all other tokens together.
    """
    if not examples[0].taught:
        return None, None
    ids = np.concatenate([np.stack([t.ids for t in example.taught], 1) for example in examples])
    logprobs = np.concatenate([np.stack([t.logprobs for t in example.taught], 1) for example in examples])
    return torch.from_numpy(ids), torch.from_numpy(logprobs)


@dataclass(frozen=True)
class Step(Sequence[Batch]):
    """The micro-batches of one update, and what is known of them before it."""

    batches: Sequence[Batch]
    metrics: Mapping[str, Any] = field(default_factory=dict)  # for the step's row; Any: JSON values
    samples: Sequence[Mapping[str, Any]] = ()  # for samples.jsonl; Any: JSON values

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:  # Any: as of any sequence, one by number or several by slice
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
        """Return the number of steps in one pass over the data, or None where passes are not counted."""
        return None

    def peek(self) -> Step:
        """Return the next step without moving on."""
        before = self.state()
        try:
            return next(self)
        finally:
            self.seek(before)

    def can_prefetch(self) -> bool:
        """Return whether the next step may be taken before the metrics of this one are known."""
        return True

    def after_update(self, step: Step, number: int, metrics: Mapping[str, Any]) -> None:  # noqa: B027
        """Check or count what came of a step, whose metrics these are. Any: JSON values."""


class IteratorStream(StepStream):
    """Lists of micro-batches from any iterable, which may end.

    Its position is the number of steps taken: a resumed run takes as many from a fresh iterable first. It
    can go back by the two steps that a trainer may have to undo: a prefetched one and the one before it.
    """

    def __init__(self, batches: Iterable[Sequence[Batch]]) -> None:
        self._batches = iter(batches)
        self._taken = 0
        self._past: deque[Step] = deque(maxlen=2)
        self._next: deque[Step] = deque()  # steps that were put back

    def __next__(self) -> Step:
        step = self._next.popleft() if self._next else self._read()
        self._past.append(step)
        self._taken += 1
        return step

    def _read(self) -> Step:
        batches = next(self._batches)
        return batches if isinstance(batches, Step) else Step(batches)

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the number of steps taken."""
        return {"taken": self._taken}

    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Skip steps up to `state`, or put back the last ones."""
        wanted = state.get("taken", self._taken)  # older checkpoints have no position of iterators
        while self._taken > wanted:
            if not self._past:
                raise CheckpointError(
                    f"{self._taken} steps were taken from this iterator, and the checkpoint is at {wanted}",
                    hint="restore into a trainer with a fresh iterator",
                )
            self._next.appendleft(self._past.pop())
            self._taken -= 1
        while self._taken < wanted:
            try:
                next(self)
            except StopIteration:
                raise CheckpointError(
                    f"the data ends after {self._taken} steps, and the checkpoint is at {wanted}"
                ) from None


class BatchStream(StepStream):
    """An endless stream of optimizer steps, each a list of micro-batches.

    The order is a pure function of (seed, epoch, step in the epoch), so two integers are its whole state.
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
        self._lengths = self._measure()
        steps = (settings.batch_size, settings.batch_tokens, settings.pack, settings.order)
        self._mark = zlib.crc32(repr((steps, seed)).encode(), zlib.crc32(self._lengths.tobytes()))

    def steps_in(self, epoch: int) -> int:
        """Optimizer steps in one pass."""
        return len(self._plan(epoch))

    def state(self) -> dict[str, int]:
        """The position, as integers, and a mark of what it is a position in."""
        return {"epoch": self.epoch, "index": self.index, "stream": self._mark}

    def seek(self, state: dict[str, int]) -> None:
        """Go to a position that `state` returned, of a stream with the same examples, steps and seed."""
        if state["stream"] != self._mark:
            raise CheckpointError(
                "the examples, their order or the size of a step have changed since this position was saved",
                hint="restore data, run.seed, run.batch_size and run.batch_tokens, or start a new run",
            )
        self.epoch, self.index = state["epoch"], state["index"]

    def __next__(self) -> Step:
        step = self._plan(self.epoch)[self.index]
        self.index += 1
        if self.index == len(self._plan(self.epoch)):
            self.epoch, self.index = self.epoch + 1, 0
        return Step(self._cut(step))

    def _measure(self) -> np.ndarray:
        return check_lengths(self.examples, self.settings)

    def _cut(self, step: Sequence[int]) -> list[Batch]:
        return step_batches(step, self.examples, self._lengths, self.settings)

    def _plan(self, epoch: int) -> EpochPlan:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, plan_epoch(self._lengths, self.settings, seed=self.seed, epoch=epoch))
        return self._planned[1]


def check_lengths(examples: Sequence[Example] | Sequence[Pair], settings: StepSettings) -> np.ndarray:
    """The examples' lengths, all of which fit a micro-batch and a step."""
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
    """The micro-batches of a step."""
    return [
        rows_batch(rows, examples, settings, token_bytes=token_bytes)
        for rows in split_step(step, lengths, settings)
    ]


def rows_batch(
    rows: Sequence[Sequence[int]],
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    token_bytes: np.ndarray | None = None,
) -> Batch:
    """One of the micro-batches that `split_step` cut, its examples in the order of their places."""
    chosen = [[example for index in row for example in members(examples[index])] for row in rows]
    if settings.pack:
        return make_batch(chosen, token_bytes=token_bytes)
    alone = [[example] for row in chosen for example in row]  # a row each
    sides = len(chosen[0])  # of a pair, which is planned as a whole
    width = settings.padded(sides * max(row[0].length for row in alone)) // sides
    return make_batch(alone, width=width, token_bytes=token_bytes)


def members(item: Example | Pair) -> tuple[Example, ...]:
    """The examples of an item that is planned as a whole."""
    return (item,) if isinstance(item, Example) else item


def one_pass(
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    token_bytes: np.ndarray | None = None,
) -> Iterator[tuple[list[int], Batch]]:
    """Every example once, in micro-batches, each with the places of what is in it."""
    one_batch = replace(settings, batch_size=None, batch_tokens=settings.micro_tokens, order="sequential")
    lengths = check_lengths(examples, one_batch)
    for group in plan_epoch(lengths, one_batch, seed=0, epoch=0):
        for rows in split_step(group, lengths, one_batch):
            places = [index for row in rows for index in row]
            yield places, rows_batch(rows, examples, one_batch, token_bytes=token_bytes)


def evaluation_batches(
    examples: Sequence[Example] | Sequence[Pair],
    settings: StepSettings,
    *,
    limit: int | None = None,
    token_bytes: np.ndarray | None = None,
) -> list[Batch]:
    """One pass in order, each micro-batch on its own, at most `limit` of them."""
    batches = (batch for _, batch in one_pass(examples, settings, token_bytes=token_bytes))
    return list(itertools.islice(batches, limit))
