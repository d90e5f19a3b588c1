"""The batches that probes look at: the same ones throughout a run, and in every part of it."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from whet.data.batches import Batch, StepStream
from whet.objectives.objective import Objective

PIECES = 4  # parts whose gradients are compared
TEXT_TOKENS = 512  # at most so many are looked at one by one


def probe_batches(stream: StepStream, objective: Objective) -> list[list[Batch]]:
    """From each of the first steps of a stream, one micro-batch (of a mix, one of each part).

    The stream is left where it was. No piece is larger than what a step has at once.
    """
    before = stream.state()
    try:
        steps = [next(stream) for _ in range(PIECES)]
    finally:
        stream.seek(before)
    found = [_first_of_each_part(step, objective) for step in steps]
    return [piece for piece in found if piece]


def _first_of_each_part(step: Iterable[Batch], objective: Objective) -> list[Batch]:
    chosen: dict[str | None, Batch] = {}
    for batch in step:
        if batch.part not in chosen and units(objective, [batch]):
            chosen[batch.part] = batch
    return list(chosen.values())


def units(objective: Objective, batches: Iterable[Batch]) -> float:
    """What the loss of these batches is a mean over: tokens, pairs or texts, those of its first term."""
    auxiliary = objective.auxiliary
    total = 0.0
    for batch in batches:
        weights = objective.weights(batch).items()
        total += next((w for term, w in weights if objective.coefficients[term] and term not in auxiliary), 0)
    return total


def texts_of(batches: Sequence[Batch], *, tokens: int = TEXT_TOKENS) -> list[torch.Tensor]:
    """The documents [1, length] of some batches, without padding, up to so many tokens in all."""
    found: list[torch.Tensor] = []
    left = tokens
    for document in _documents(batches):
        if left <= 0:
            break
        found.append(document[None, :left])
        left -= len(document)
    return found


def _documents(batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    for batch in batches:
        real = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.real is None else batch.real
        for row, tokens in enumerate(batch.tokens):
            lengths = (len(tokens),) if batch.documents is None else batch.documents[row]
            for part, is_real in zip(tokens.split(lengths), real[row].split(lengths), strict=True):
                if is_real.any():
                    yield part[is_real]
