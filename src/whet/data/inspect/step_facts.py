"""Facts about the steps of a run: number, size and padding, and one micro-batch to display."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from whet.config.run_config import RunConfig
from whet.data.batches import BatchStream, members
from whet.data.packing import StepSettings, plan_epoch, split_step
from whet.data.run_data import RunData
from whet.data.tokens.examples import Example, StoredExamples

MEASURED_EXAMPLES = 100_000  # splitting steps into micro-batches takes a few microseconds per example
DRAWN_ROWS = 12


@dataclass(frozen=True)
class Document:
    """One example in a displayed row: runs of positions that are all supervised or all context."""

    origin: str
    runs: tuple[tuple[int, bool], ...]

    @property
    def length(self) -> int:
        """The number of positions of the example."""
        return sum(length for length, _ in self.runs)


@dataclass(frozen=True)
class DisplayedRow:
    """A displayed row: documents, then padding."""

    documents: tuple[Document, ...]
    padding: int


@dataclass(frozen=True)
class StepFacts:
    """Facts about the steps of a run."""

    steps: int  # of the run
    steps_per_epoch: int
    epochs: float
    examples_per_step: float
    tokens_per_step: float  # positions without padding
    micro_batches: float  # per step
    micro_tokens: int
    efficiency: float  # fraction of the computed positions that are not padding
    micro_batch_fill: float  # fraction of the micro-batch capacity that is used
    measured: int  # number of steps on which the averages above were measured
    has_curriculum: bool  # a curriculum changes the contents of steps
    displayed_rows: tuple[DisplayedRow, ...]
    rows: int  # rows of the micro-batch, displayed or not
    supervised_per_epoch: int | None = None  # supervised tokens; None if the data do not count them
    is_streamed: bool = False  # measured on the first block of a stream, which has no epochs

    @property
    def tokens_per_epoch(self) -> int:
        """The number of tokens of an epoch, without padding."""
        return round(self.steps_per_epoch * self.tokens_per_step)

    @property
    def tokens(self) -> int:
        """The approximate number of tokens of the run."""
        return round(self.steps * self.tokens_per_step)


@dataclass(frozen=True)
class RunCost:
    """The estimated time and memory of a run on a device."""

    device: str
    step_s: float
    utilization: float  # the assumed fraction of the peak FLOPS
    peak_bytes: int
    memory_bytes: int  # of the device


def plan_steps(config: RunConfig, data: RunData) -> StepFacts:
    """Measure the first epoch. Raises the errors of `whet train`, such as an example that is too long."""
    run, settings, stream = config.run, data.steps, data.stream()
    examples: Any = data.examples["train"]  # Any: sequences of examples, or of pairs of them
    if isinstance(stream, BatchStream):
        examples = stream.examples  # including oversampled examples
    lengths = examples.lengths
    plan = plan_epoch(lengths, settings, seed=run.seed, epoch=0)
    steps = run.steps or len(plan)
    if run.epochs and isinstance(stream, BatchStream):
        steps = sum(stream.steps_in(epoch) for epoch in range(run.epochs))
    real = positions = batches = measured = seen = 0
    for step in plan:
        for rows in split_step(step, lengths, settings):
            filled = [sum(int(lengths[index]) for index in row) for row in rows]
            real += sum(filled)
            positions += len(rows) * settings.padded(max(filled))
            batches += 1
        measured += 1
        seen += len(step)
        if seen >= MEASURED_EXAMPLES:
            break
    first = split_step(plan[0], lengths, settings)[0]
    return StepFacts(
        steps=steps,
        steps_per_epoch=len(plan),
        epochs=steps / len(plan),
        examples_per_step=len(plan.indices) / len(plan),
        tokens_per_step=float(lengths[plan.indices].sum()) / len(plan),
        micro_batches=batches / measured,
        micro_tokens=settings.micro_tokens,
        efficiency=real / positions,
        micro_batch_fill=real / (batches * settings.micro_tokens),
        measured=measured,
        has_curriculum=config.data.curriculum is not None,
        is_streamed=config.data.stream is not None,
        displayed_rows=_drawn_rows(first[:DRAWN_ROWS], examples, settings),
        rows=len(first),
        supervised_per_epoch=_count_supervised(examples, plan.indices),
    )


def _count_supervised(examples: Any, indices: np.ndarray) -> int | None:  # Any: as above
    sides = getattr(examples, "sides", None)  # examples in a list of another kind have no stored counts
    if not isinstance(sides, StoredExamples) or sides.is_classification:
        return None
    per_example = sides.supervised_counts().reshape(len(examples), -1).sum(1)
    return int(per_example[indices].sum())


def _drawn_rows(
    rows: list[list[int]], examples: Sequence[Any], settings: StepSettings
) -> tuple[DisplayedRow, ...]:  # Any: sequences of examples, or of pairs of them
    row_examples = [[example for index in row for example in members(examples[index])] for row in rows]
    if not settings.pack:  # one row per example
        row_examples = [[example] for row in row_examples for example in row]
    filled = [sum(example.length for example in row) for row in row_examples]
    width = settings.padded(max(filled))
    return tuple(
        DisplayedRow(tuple(map(_to_document, row)), width - used)
        for row, used in zip(row_examples, filled, strict=True)
    )


def _to_document(example: Example) -> Document:
    """Convert an example. A position is supervised if the next token is."""
    runs = groupby(np.asarray(example.supervised[1:], dtype=bool).tolist())
    return Document(
        example.origin, tuple((sum(1 for _ in positions), supervised) for supervised, positions in runs)
    )
