"""Loss of an objective over a training step or an evaluation, normalized by the total weights."""

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
from whet.models.language_model import Trainable, eval_mode
from whet.objectives.objective import Loss, Objective
from whet.parallel.gradient_sync import is_sharded
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.training.callback_list import CallbackList
from whet.training.callbacks import EvaluationStoppedError, Metrics


def total_weights(objective: Objective, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the sum of the weights of each loss term over all batches.

    Raises:
        DataError: If no term has a weight, because the mean would be NaN, or if the objective would ignore
            the loss weights of tokens.
    """
    totals: dict[str, float] = dict.fromkeys(objective.coefficients, 0.0)
    for batch in batches:
        _check_token_weights(objective.parts.get(batch.part or "", objective), batch)
        for term, weight in objective.weights(batch).items():
            totals[term] += weight
    if not any(weight for term, weight in totals.items() if term not in objective.auxiliary):
        origins = ", ".join(origin for batch in batches for origin in batch.origins)
        raise DataError(f"a batch has no supervised tokens (records: {origins})")
    return totals


def _check_token_weights(objective: Objective, batch: Batch) -> None:
    if batch.weights is not None and not objective.uses_token_weights:
        raise DataError(
            f"{batch.origins[0]}: this batch has loss weights, which {type(objective).__name__} does not use",
            hint="use batch.supervised_weights and set uses_token_weights = True in the objective, or set "
            "data.ignore to [weight]",
        )


def loss_weight(objective: Objective, batches: Sequence[Batch]) -> float:
    """Return the number of units (supervised tokens, pairs or texts) that the loss is averaged over."""
    main_terms = {
        t for t, factor in objective.coefficients.items() if factor and t not in objective.auxiliary
    }
    return sum(
        weight for batch in batches for term, weight in objective.weights(batch).items() if term in main_terms
    )


def share_batches(
    world: World, batches: Sequence[Batch], *, matched: bool
) -> Iterator[tuple[int, Batch, bool]]:
    """Yield the batches that this rank computes, each with its index and whether its result counts.

    With `matched`, every rank runs the same sequence of forward passes, which sharded models need to avoid
    deadlocks. The parts of a mix need different forward passes, so they are distributed one after the other.
    """
    if not matched:
        yield from world.local_items(batches)
        return
    start = 0
    for _, group in itertools.groupby(batches, key=lambda batch: batch.part):
        part_batches = list(group)
        for index, batch, counts in world.local_items(part_batches, pad=True):
            yield start + index, batch, counts
        start += len(part_batches)


def weighted_loss(
    model: Trainable,
    objective: Objective,
    batch: Batch,
    *,
    weights: dict[str, float],
    precision: Precision,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a micro-batch's share of the step's loss and of its metrics.

    The loss is the sum over terms of coefficient * term / weight; `weights` are those of the whole step.
    """
    return _shares(compute_loss(model, objective, batch, precision=precision), objective, weights)


def compute_loss(model: Trainable, objective: Objective, batch: Batch, *, precision: Precision) -> Loss:
    """Return the loss sums of a micro-batch, computed in the run's precision."""
    with autocast_context(precision, batch.tokens.device):
        return objective.loss(model, batch)


def autocast_context(precision: Precision, device: torch.device) -> torch.autocast:
    """Return an autocast context for a run's precision; disabled if compute and trained dtypes are equal."""
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
        if (weight := weights[result.units.get(name, first)])  # a metric without units has no mean
    }
    for name, shares in objective.reports.items():  # sums of the means of several terms
        present = {term: share for term, share in shares.items() if term in result.sums}
        if not present:  # it belongs to another part of a mix
            continue
        parts = [
            share / weights[term] * result.sums[term] for term, share in present.items() if weights[term]
        ]
        metrics[name] = torch.stack(parts).sum().detach() if parts else torch.zeros_like(terms[0])
    return torch.stack(terms).sum(), metrics


def evaluate_loss(
    model: Trainable,
    objective: Objective,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    pause: Callable[[], None] = lambda: None,
    world: World = SINGLE_PROCESS,
) -> dict[str, Any]:  # Any: numbers, and lists of numbers
    """Return the evaluation metrics of a model over `batches`.

    They are eval_loss, eval_perplexity and eval_bits_per_byte where they apply, eval_s (the duration in
    seconds), and the objective's metrics with the prefix `eval_`. `pause` is called before each batch and may
    raise to abort the evaluation.
    """
    started = time.perf_counter()
    batches = list(batches)
    weights = total_weights(objective, batches)
    sums: dict[str, torch.Tensor] = defaultdict(
        lambda: torch.zeros((), device=model.device, dtype=torch.float64)
    )
    outputs: list[torch.Tensor] = []
    matched = is_sharded(model)
    with eval_mode(model), world.sync_errors() if not matched else contextlib.nullcontext():
        for _, batch, counts in share_batches(world, batches, matched=matched):
            with world.sync_errors() if matched else contextlib.nullcontext():
                pause()
            result = compute_loss(model, objective, batch.to(model.device), precision=precision)
            if not counts:
                continue
            outputs += [] if result.outputs is None else [result.outputs.cpu()]
            loss, metrics = _shares(result, objective, weights)
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums[name] + value
    totals = world.sum_values({name: value.tolist() for name, value in sums.items()})
    results: dict[str, Any] = {f"eval_{name}": value for name, value in totals.items()}
    likelihood = objective.likelihood
    mean = results[f"eval_{likelihood}" if isinstance(likelihood, str) else "eval_loss"]
    if likelihood:
        results["eval_perplexity"] = math.inf if mean >= 700 else math.exp(mean)
    sizes = [batch.supervised_bytes for batch in batches if batch.supervised_bytes]
    has_weights = any(batch.weights is not None for batch in batches)  # not a mean over the bytes then
    if likelihood and len(sizes) == len(batches) and not has_weights:
        supervised = sum(batch.supervised for batch in batches)
        results["eval_bits_per_byte"] = mean * supervised / (sum(sizes) * math.log(2))
    if world.broadcast(bool(outputs)):
        results |= objective.summarise(world.gather_in_order(outputs, len(batches)), batches)
    return {**results, "eval_s": time.perf_counter() - started}


class Evaluation:
    """Runs the evaluations of a run, and lets callbacks abort them."""

    def __init__(self, callbacks: CallbackList, world: World) -> None:
        self.callbacks = callbacks
        self.world = world

    def loss(
        self, model: Trainable, objective: Objective, batches: Iterable[Batch], *, precision: Precision
    ) -> Metrics:
        """Return the loss over batches and the metrics of the objective; see `evaluate_loss`."""
        return evaluate_loss(
            model, objective, batches, precision=precision, pause=self.pause_point, world=self.world
        )

    def run(self, evaluators: Iterable[Callable[[], Metrics]]) -> Metrics | None:
        """Return the metrics of all evaluators and their duration, or None if a callback aborted them."""
        start = time.perf_counter()
        metrics: Metrics = {}
        try:
            for evaluator in evaluators:
                metrics |= evaluator()
        except EvaluationStoppedError:
            self.callbacks.agree_on_stop()
            return None
        metrics["eval_s"] = time.perf_counter() - start
        return metrics

    def pause_point(self) -> None:
        """Send a heartbeat, and abort the evaluation if a callback asks to stop."""
        self.world.watchdog.report_activity("evaluating")
        self.callbacks.pause()

    def pause_between_completions(self) -> None:
        """Send a heartbeat between generated completions; without tensor parallelism, also allow an abort."""
        if self.world.tp_size > 1:
            self.world.watchdog.report_activity("generating")
        else:
            self.pause_point()
