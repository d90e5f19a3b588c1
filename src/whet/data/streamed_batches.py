"""Training steps from records that are read, tokenized and packed while a run trains on them.

A stream is a sequence of blocks. A block is a number of records, tokenized, shuffled and packed together; the
examples that do not fill a step are carried into the next block. A block is a pure function of its start, so
the start of the current block and the number of steps drawn from it are the complete state of the stream.
"""

import base64
import logging
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whet.data.batches import Step, StepStream, check_lengths, step_batches
from whet.data.packing import EpochPlan, StepSettings, plan_block
from whet.data.sources.record_stream import RecordStream, StreamState
from whet.data.sources.source import Record, Skipped
from whet.data.tokens.examples import Example, StoredExamples, TooLong, build_examples
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.token_store import SUPERVISED_BIT
from whet.errors import CheckpointError, DataError

log = logging.getLogger("whet")


@dataclass(frozen=True)
class StreamSettings:
    """How records become examples and blocks.

    Args:
        name: The name of the source, for messages.
        buffer: The number of records in a block.
        seed: Seed of the order.
        max_length: Maximum number of tokens of an example.
        too_long: What happens to longer ones.
    """

    name: str
    buffer: int
    seed: int
    max_length: int
    too_long: TooLong


@dataclass(frozen=True)
class BlockStart:
    """The state of a stream before a block."""

    block: int  # the number of the block, from 0
    step: int  # the number of steps in the blocks before it
    position: StreamState  # of the records
    carried: tuple[Example, ...] = ()

    @cached_property
    def state(self) -> dict[str, Any]:  # Any: JSON values
        """The start as JSON values."""
        return {
            "block": self.block,
            "step": self.step,
            "position": self.position,
            "carried": [_to_json(example) for example in self.carried],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BlockStart":  # Any: JSON values
        """Return the start that `state` describes."""
        carried = tuple(_from_json(example) for example in state["carried"])
        return cls(state["block"], state["step"], state["position"], carried)


@dataclass(frozen=True)
class Block:
    """The examples of a block, and their steps."""

    start: BlockStart
    next_start: BlockStart
    examples: StoredExamples
    lengths: np.ndarray
    plan: EpochPlan


class _ClosedError(Exception):
    """The stream was closed while a block was read."""


class StreamedBatches(StepStream):
    """An endless stream of optimizer steps, read block by block. The next block is read in a thread.

    Args:
        records: The records, from their start.
        preparation: Tokenizes the records.
        steps: The size and order of the steps.
        settings: The size and order of the blocks.
    """

    def __init__(
        self, records: RecordStream, preparation: Preparation, steps: StepSettings, settings: StreamSettings
    ) -> None:
        self.settings = settings
        self.steps = steps
        self.vocab_size: int | None = None  # of the model: blocks with other tokens are errors
        self._records = records
        self._preparation = preparation
        self._start = BlockStart(0, 0, records.state())
        self._index = 0  # of the next step in the block
        self._block: Block | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._next: tuple[BlockStart, Future[Block]] | None = None
        self._closed = threading.Event()
        sizes = (steps.batch_size, steps.batch_tokens, steps.pack, steps.order)
        self._fingerprint = zlib.crc32(repr((sizes, settings.buffer, settings.seed)).encode())
        self._last_productive: int | None = None  # complete passes when a block last had new examples

    def first_block(self) -> StoredExamples:
        """Return the examples of the first block, to check them before training.

        Raises:
            DataError: It has none, or a record of it is bad.
        """
        block = self._load()
        if not len(block.examples):
            notes = block.examples.store.notes
            if notes["skipped"]:
                raise Skipped(notes["skipped"], notes["reasons"], notes["hint"]).as_error(self.settings.name)
            raise DataError(
                f"{self.settings.name}: no example is left of the first {self.settings.buffer:,} records",
                hint=f"raise data.max_length, which is {self.settings.max_length}",
            )
        return block.examples

    def __next__(self) -> Step:
        block = self._load()
        while self._index == len(block.plan):
            self._start, self._index = block.next_start, 0
            block = self._load()
        self._read_ahead(block)
        step = block.plan[self._index]
        self._index += 1
        return Step(step_batches(step, block.examples, block.lengths, self.steps))

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the start of the block and the number of steps drawn from it."""
        start, index = self._start, self._index
        if self._block is not None and self._block.start is start and index == len(self._block.plan):
            start, index = self._block.next_start, 0
        return {**start.state, "index": index, "stream": self._fingerprint}

    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Continue from a position that `state` returned. Records are read at the next step."""
        if state.get("stream") != self._fingerprint:
            raise CheckpointError(
                "the size or order of the steps or blocks has changed since this position was saved",
                hint="restore data.stream, run.seed, run.batch_size and run.batch_tokens, or start a new run",
            )
        self._index = state["index"]
        known = [] if self._block is None else [self._block.start, self._block.next_start]
        for start in known:
            if start.state.items() <= state.items():
                self._start = start  # the same object: its block is in memory, or being read
                return
        self._start = BlockStart.from_state(state)
        self._last_productive = None

    def close(self) -> None:
        """Stop reading, and end the thread."""
        self._closed.set()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._worker = self._next = None
        self._records.close()
        self._closed.clear()

    def _load(self) -> Block:
        """Return the block of the current position."""
        if self._block is not None and self._block.start is self._start:
            return self._block
        self._block = None  # free it before the next one is complete
        pending, self._next = self._next, None
        if pending is not None and pending[0] is self._start:
            block = pending[1].result()
        else:
            if pending is not None and not pending[1].cancel():
                pending[1].exception()  # wait for its end: both would read the same files
            block = self._read(self._start)
        self._report(block)
        self._block = block
        return block

    def _read_ahead(self, block: Block) -> None:
        if self._next is not None:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="whet-stream")
        self._next = (block.next_start, self._worker.submit(self._read, block.next_start))

    def _read(self, start: BlockStart) -> Block:
        """Read, tokenize and plan one block."""
        settings = self.settings
        self._records.seek(start.position)
        store = self._preparation.buffer(self._rows(start), name=settings.name, carried=start.carried)
        examples = build_examples(
            store, max_length=settings.max_length, too_long=settings.too_long, may_be_empty=True
        )
        self._check(examples, carried=len(start.carried))
        lengths = check_lengths(examples, self.steps) if len(examples) else examples.lengths
        plan, rest = plan_block(
            lengths, self.steps, carried=len(start.carried), seed=settings.seed, block=start.block
        )
        next_start = BlockStart(
            block=start.block + 1,
            step=start.step + len(plan),
            position=self._records.state(),
            carried=tuple(_without_unit_weights(examples[index]) for index in rest.tolist()),
        )
        return Block(start, next_start, examples, lengths, plan)

    def _rows(self, start: BlockStart) -> Iterator[Record | DataError]:
        for record in self._records.read(self.settings.buffer, step=start.step):
            if self._closed.is_set():
                raise _ClosedError
            yield record

    def _check(self, examples: StoredExamples, *, carried: int) -> None:
        """Raise an error for tokens that the model lacks, or if passes go by without any new example."""
        store, passes = examples.store, self._records.passes
        if self.vocab_size is not None and store.largest >= self.vocab_size:
            raise DataError(
                f"{store.origin(store.record_with(store.largest))}: token {store.largest} is outside the "
                f"model's vocabulary: vocab_size={self.vocab_size}",
                hint="the tokenizer belongs to another model",
            )
        if len(examples) > carried or self._last_productive is None:
            self._last_productive = passes
        elif passes > self._last_productive + 1:
            raise DataError(
                f"{self.settings.name}: a pass over all records gave no example",
                hint=f"raise data.max_length, which is {self.settings.max_length}",
            )

    def _report(self, block: Block) -> None:
        notes = block.examples.store.notes
        if block.start.block and notes["skipped"]:  # `RunData.prepare` reports the first block
            skipped = Skipped(notes["skipped"], notes["reasons"])
            log.warning("train: block %d: %s", block.start.block, skipped.summary())


def _without_unit_weights(example: Example) -> Example:
    """Return an example without its weights if they are those of its loss mask."""
    mask = np.asarray(example.supervised, dtype=bool)
    weights = None if example.weights is None else np.asarray(example.weights, dtype=np.float32)
    if weights is not None and (weights[mask] == 1).all():
        weights = None
    return Example(example.tokens, mask, example.origin, example.values, weights=weights)


def _to_json(example: Example) -> dict[str, Any]:  # Any: JSON values
    packed = np.asarray(example.tokens, dtype="<u4") | (np.asarray(example.supervised) * SUPERVISED_BIT)
    weights = None if example.weights is None else _pack(np.asarray(example.weights, dtype="<f4"))
    return {
        "tokens": _pack(packed.astype("<u4")),
        "origin": example.origin,
        "values": list(example.values),
        "weights": weights,
    }


def _from_json(value: dict[str, Any]) -> Example:  # Any: JSON values
    packed = np.frombuffer(base64.b64decode(value["tokens"]), dtype="<u4").astype(np.uint32)
    weights = value["weights"]
    return Example(
        (packed & ~SUPERVISED_BIT).astype(np.int64),
        (packed & SUPERVISED_BIT) != 0,
        value["origin"],
        tuple(value["values"]),
        weights=None if weights is None else np.frombuffer(base64.b64decode(weights), dtype="<f4"),
    )


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
