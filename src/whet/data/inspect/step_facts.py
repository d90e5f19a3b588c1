"""The steps of a run as numbers: how many, how large, how well filled; and one micro-batch to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from whet.config.run_config import RunConfig
from whet.data.batches import BatchStream, members
from whet.data.packing import StepSettings, plan_epoch, split_step
from whet.data.run_data import RunData
from whet.data.tokens.examples import Example

MEASURED_EXAMPLES = 100_000  # cutting steps into micro-batches takes a few microseconds an example
DRAWN_ROWS = 12


@dataclass(frozen=True)
class Document:
    """One example in a drawn row: stretches of positions, each learned or context."""

    origin: str
    stretches: tuple[tuple[int, bool], ...]

    @property
    def length(self) -> int:
        """Positions it takes."""
        return sum(length for length, _ in self.stretches)


@dataclass(frozen=True)
class DrawnRow:
    """Documents one after the other, then padding."""

    documents: tuple[Document, ...]
    padding: int


@dataclass(frozen=True)
class StepFacts:
    """The plan of a run."""

    steps: int  # of the whole run
    in_epoch: int
    epochs: float
    examples_a_step: float
    tokens_a_step: float  # positions that are no padding
    micro_batches: float  # of a step
    micro_tokens: int
    efficiency: float  # real tokens of all positions computed
    filled: float  # real tokens of what the micro-batches could hold
    measured: int  # steps that the last four were measured on
    staged: bool  # a curriculum changes what is in a step
    drawn: tuple[DrawnRow, ...]
    rows: int  # of that micro-batch, drawn or not

    @property
    def tokens(self) -> int:
        """Of the whole run, about."""
        return round(self.steps * self.tokens_a_step)


def plan_steps(config: RunConfig, data: RunData) -> StepFacts:
    """Measure the first epoch. Raises what `whet train` would: an example that fits no step, say."""
    run, settings, stream = config.run, data.steps, data.stream()
    examples: Any = data.examples["train"]  # Any: sequences of examples, or of pairs of them
    if isinstance(stream, BatchStream):
        examples = stream.examples  # with those that are repeated
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
        in_epoch=len(plan),
        epochs=steps / len(plan),
        examples_a_step=len(plan.indices) / len(plan),
        tokens_a_step=float(lengths[plan.indices].sum()) / len(plan),
        micro_batches=batches / measured,
        micro_tokens=settings.micro_tokens,
        efficiency=real / positions,
        filled=real / (batches * settings.micro_tokens),
        measured=measured,
        staged=not isinstance(stream, BatchStream),
        drawn=_drawn(first[:DRAWN_ROWS], examples, settings),
        rows=len(first),
    )


def _drawn(
    rows: list[list[int]], examples: Sequence[Any], settings: StepSettings
) -> tuple[DrawnRow, ...]:  # Any: as above
    drawn = [[example for index in row for example in members(examples[index])] for row in rows]
    if not settings.pack:  # a row each
        drawn = [[example] for row in drawn for example in row]
    filled = [sum(example.length for example in row) for row in drawn]
    width = settings.padded(max(filled))
    return tuple(
        DrawnRow(tuple(map(_document, row)), width - real) for row, real in zip(drawn, filled, strict=True)
    )


def _document(example: Example) -> Document:
    """By targets: a position is learned when the token after it is."""
    stretches = groupby(np.asarray(example.supervised[1:], dtype=bool).tolist())
    return Document(example.origin, tuple((sum(1 for _ in same), learned) for learned, same in stretches))
