"""The loss of an objective: normalised by the weights of a whole step, and over a whole split."""

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from whet.data.batches import Batch
from whet.errors import DataError
from whet.hardware import Precision
from whet.models.language_model import Trainable, evaluating
from whet.objectives.objective import Loss, Objective
from whet.parallel.gradient_sync import is_sharded
from whet.parallel.process_group import SOLO, World


def total_weights(objective: Objective, batches: Sequence[Batch]) -> dict[str, float]:
    """Supervised units of each term over all batches; none at all is an error, never a NaN."""
    totals: dict[str, float] = dict.fromkeys(objective.coefficients, 0.0)
    for batch in batches:
        for term, weight in objective.weights(batch).items():
            totals[term] += weight
    if not any(weight for term, weight in totals.items() if term not in objective.auxiliary):
        origins = ", ".join(origin for batch in batches for origin in batch.origins)
        raise DataError(f"a batch has no supervised token (records: {origins})")
    return totals


def loss_weight(objective: Objective, batches: Sequence[Batch]) -> float:
    """Return how many units (supervised tokens, pairs, texts) the loss over some batches is a mean over."""
    counted = {t for t, factor in objective.coefficients.items() if factor and t not in objective.auxiliary}
    return sum(
        weight for batch in batches for term, weight in objective.weights(batch).items() if term in counted
    )


def taken(world: World, batches: Sequence[Batch], *, matched: bool) -> Iterator[tuple[int, Batch, bool]]:
    """This rank's share of some batches, each with its place, and whether it counts.

    `matched`: all ranks make the same forward passes at the same time, so nobody waits for ever. Then the
    parts of a mix, which need different ones, are shared out one after the other.
    """
    if not matched:
        yield from world.rounds(batches)
        return
    start = 0
    for _, group in itertools.groupby(batches, key=lambda batch: batch.part):
        found = list(group)
        for place, batch, counts in world.rounds(found, matched=True):
            yield start + place, batch, counts
        start += len(found)


def weighted_loss(
    model: Trainable,
    objective: Objective,
    batch: Batch,
    *,
    weights: dict[str, float],
    precision: Precision,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's share of the loss (coefficient * sum / total weight, over terms) and of the metrics."""
    return _shares(computed_loss(model, objective, batch, precision=precision), objective, weights)


def computed_loss(model: Trainable, objective: Objective, batch: Batch, *, precision: Precision) -> Loss:
    """What an objective makes of a micro-batch, in the run's precision."""
    with in_precision(precision, batch.tokens.device):
        return objective.loss(model, batch)


def in_precision(precision: Precision, device: torch.device) -> torch.autocast:
    """Within this, a model computes in the precision of a run."""
    mixed = precision.compute != precision.trained
    return torch.autocast(device.type, dtype=precision.compute, enabled=mixed)


def _shares(
    result: Loss, objective: Objective, weights: dict[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    terms = [
        objective.coefficients[term] / weights[term] * value
        for term, value in result.sums.items()
        if weights[term]
    ]
    first = next(iter(weights))
    metrics = {
        name: value.detach() / weight
        for name, value in result.metrics.items()
        if (weight := weights[result.units.get(name, first)])  # of no units there is no mean
    }
    for name, shares in objective.reports.items():  # of the means of several terms
        there = {term: share for term, share in shares.items() if term in result.sums}
        if not there:  # those of another part of a mix
            continue
        parts = [share / weights[term] * result.sums[term] for term, share in there.items() if weights[term]]
        metrics[name] = torch.stack(parts).sum().detach() if parts else torch.zeros_like(terms[0])
    return torch.stack(terms).sum(), metrics


def evaluate_loss(
    model: Trainable,
    objective: Objective,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    pause: Callable[[], None] = lambda: None,
    world: World = SOLO,
) -> dict[str, Any]:  # Any: numbers, and lists of numbers
    """eval_loss, eval_perplexity, eval_bits_per_byte, eval_s, and the objective's own numbers as eval_*.

    `pause` is called before each batch, and may raise.
    """
    started = time.perf_counter()
    batches = list(batches)
    weights = total_weights(objective, batches)
    sums: dict[str, torch.Tensor] = defaultdict(
        lambda: torch.zeros((), device=model.device, dtype=torch.float64)
    )
    mine: list[torch.Tensor] = []
    matched = is_sharded(model)
    with evaluating(model), world.abreast() if not matched else contextlib.nullcontext():
        for _, batch, counts in taken(world, batches, matched=matched):
            with world.abreast() if matched else contextlib.nullcontext():
                pause()
            result = computed_loss(model, objective, batch.to(model.device), precision=precision)
            if not counts:
                continue
            mine += [] if result.outputs is None else [result.outputs.cpu()]
            loss, metrics = _shares(result, objective, weights)
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums[name] + value
    totals = world.sums({name: value.tolist() for name, value in sums.items()})
    found: dict[str, Any] = {f"eval_{name}": value for name, value in totals.items()}
    likelihood = objective.likelihood
    mean = found[f"eval_{likelihood}" if isinstance(likelihood, str) else "eval_loss"]
    if likelihood:
        found["eval_perplexity"] = math.inf if mean >= 700 else math.exp(mean)
    sizes = [batch.supervised_bytes for batch in batches if batch.supervised_bytes]
    if likelihood and len(sizes) == len(batches):
        supervised = sum(batch.supervised for batch in batches)
        found["eval_bits_per_byte"] = mean * supervised / (sum(sizes) * math.log(2))
    if world.from_main(bool(mine)):
        found |= objective.summarise(world.in_order(mine, len(batches)), batches)
    return {**found, "eval_s": time.perf_counter() - started}
