"""The fixed batches that probes are measured on, also after a resume."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from whet.data.batches import Batch, StepStream
from whet.objectives.objective import Objective

PIECES = 4  # small batches whose gradients are compared
TEXT_TOKENS = 512  # limit for probes that run documents one by one


def probe_batches(stream: StepStream, objective: Objective) -> list[list[Batch]]:
    """Return one micro-batch from each of the first steps of a stream; for a mix, one of each part.

    The position of the stream does not change.
    """
    before = stream.state()
    try:
        steps = [next(stream) for _ in range(PIECES)]
    finally:
        stream.seek(before)
    pieces = [_first_of_each_part(step, objective) for step in steps]
    return [piece for piece in pieces if piece]


def _first_of_each_part(step: Iterable[Batch], objective: Objective) -> list[Batch]:
    selected: dict[str | None, Batch] = {}
    for batch in step:
        if batch.part not in selected and loss_units(objective, [batch]):
            selected[batch.part] = batch
    return list(selected.values())


def loss_units(objective: Objective, batches: Iterable[Batch]) -> float:
    """Return the number of tokens, pairs or texts that the first term of the loss is averaged over."""
    auxiliary = objective.auxiliary
    total = 0.0
    for batch in batches:
        weights = objective.weights(batch).items()
        total += next((w for term, w in weights if objective.coefficients[term] and term not in auxiliary), 0)
    return total


def documents_of(batches: Sequence[Batch], *, tokens: int = TEXT_TOKENS) -> list[torch.Tensor]:
    """Return the documents [1, length] of batches without padding, up to `tokens` tokens in total."""
    documents: list[torch.Tensor] = []
    remaining = tokens
    for document in _split_documents(batches):
        if remaining <= 0:
            break
        documents.append(document[None, :remaining])
        remaining -= len(document)
    return documents


def _split_documents(batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    for batch in batches:
        real = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.real is None else batch.real
        for row, tokens in enumerate(batch.tokens):
            lengths = (len(tokens),) if batch.documents is None else batch.documents[row]
            for part, is_real in zip(tokens.split(lengths), real[row].split(lengths), strict=True):
                if is_real.any():
                    yield part[is_real]
