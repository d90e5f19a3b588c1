"""What a run that classifies does besides training: its classes, its head, its balance."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F

from whet.config.classify import ClassifyObjective
from whet.data.batches import Batch, one_pass
from whet.data.examples import Example, StoredExamples
from whet.data.labels import Labels
from whet.data.plan import StepSettings
from whet.data.strata import class_counts, describe_classes
from whet.hardware import Precision
from whet.models.heads import ClassificationHead
from whet.models.language_model import LanguageModel
from whet.models.modes import evaluating
from whet.objectives.classify import Classify, balanced_weights, mark_weights
from whet.parallel.gradients import is_sharded
from whet.parallel.group import SOLO, World
from whet.training.objective_inputs import ObjectiveInputs
from whet.training.run_data import Needs

log = logging.getLogger("whet")

# Trained models need 1 to 10. Divided by 100, their probabilities are next to uniform: what asks for more has
# learned nothing. On random labels the best temperature is infinite, which would wipe the head out.
MAX_TEMPERATURE = 100.0
CALIBRATION_STEPS = 80  # of a golden-section search: far below rounding
UNBALANCED = 2.0  # the largest class over the smallest, from which `auto` weights them


def labels_of(section: ClassifyObjective) -> Labels:
    """Return the classes of a task, by name and by number."""
    return Labels(section.names, multi_label=section.multi_label)


def needs(section: ClassifyObjective) -> Needs:
    """Return what is read from records: labels; some are held out of each class, or repeated."""
    return Needs(labels=labels_of(section), valid_share=section.valid_share, oversample=section.oversample)


def build_objective(section: ClassifyObjective, inputs: ObjectiveInputs) -> Classify:
    """Return the objective with a new head."""
    return build_classify(section, inputs.model, inputs.training_examples(), seed=inputs.seed)


def build_classify(
    section: ClassifyObjective, model: LanguageModel, train: Sequence[StoredExamples], *, seed: int
) -> Classify:
    """The objective, with a new head, weighted as the training records ask for."""
    names = section.names
    head = ClassificationHead(
        model.head().weight.shape[1], len(names), pooling=section.pooling, bias=section.bias
    ).initialise(seed)
    return Classify(
        head.to(model.device),
        multi_label=section.multi_label,
        class_weights=_class_weights(section, train),
        normalise=section.normalise,
        label_smoothing=section.label_smoothing,
        focal=section.focal,
    )


def _class_weights(section: ClassifyObjective, train: Sequence[StoredExamples]) -> list[float]:
    names, kind = section.names, section.class_weights
    counts = np.sum([class_counts(labels_of(section), examples) for examples in train], axis=0)
    log.info("classes: %s", describe_classes(names, counts))
    if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
        log.warning("no training record is of the class %s", ", ".join(absent))
    if isinstance(kind, list):
        return kind
    if section.multi_label:
        chosen = cast(Literal["none", "inverse", "sqrt_inverse"], "none" if kind == "auto" else kind)
        weights = mark_weights(counts, sum(map(len, train)), chosen)
    else:
        ratio = counts.max() / max(1, counts.min())
        unbalanced = ratio > UNBALANCED and not section.oversample
        if kind == "auto":
            kind = "sqrt_inverse" if unbalanced else "none"
            if unbalanced:
                log.info(
                    "class weights: sqrt_inverse, as the largest class is %.1f times the smallest", ratio
                )
        weights = balanced_weights(counts, kind)
    if kind not in ("auto", "none"):
        log.info(
            "class weights: %s", ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights, strict=True))
        )
    return weights


def rows_of(
    compute: Callable[[LanguageModel, Batch], torch.Tensor],
    model: LanguageModel,
    examples: Sequence[Example],
    steps: StepSettings,
    *,
    precision: Precision,
    world: World = SOLO,
) -> np.ndarray:
    """What `compute` gives for each example, a row each, in their order; each rank computes its share."""
    mixed = precision.compute != precision.trained
    batches = list(one_pass(examples, steps))
    mine: list[np.ndarray] = []
    with evaluating(model):
        for _, (_, batch), counts in world.rounds(batches, matched=is_sharded(model)):
            with torch.autocast(model.device.type, dtype=precision.compute, enabled=mixed):
                rows = compute(model, batch.to(model.device)).float().cpu().numpy()
            mine += [rows] if counts else []
    parts = world.in_order(mine, len(batches))
    found = np.zeros((len(examples), parts[0].shape[1]), dtype=np.float32)
    for (places, _), part in zip(batches, parts, strict=True):
        found[places] = part
    return found


def fitted_temperature(logits: np.ndarray, labels: np.ndarray, *, multi_label: bool) -> float:
    """What logits are divided by for the likeliest labels: a golden-section search over its logarithm.

    It stays between 1 / MAX_TEMPERATURE and MAX_TEMPERATURE. Where every label is the likeliest already,
    nothing is too sure: that is 1.
    """
    if (((logits > 0) == labels) if multi_label else logits.argmax(1) == labels).all():  # soft ones never are
        log.warning("calibrate: every label is the likeliest already, which says nothing of a temperature")
        return 1.0
    wide = torch.from_numpy(logits).double()
    targets = torch.from_numpy(labels).double() if multi_label else torch.from_numpy(labels).long()

    def loss(log_temperature: float) -> float:
        scaled = wide / math.exp(log_temperature)
        if multi_label:
            return F.binary_cross_entropy_with_logits(scaled, targets).item()
        return F.cross_entropy(scaled, targets).item()

    bound, (low, high), part = math.log(MAX_TEMPERATURE), (-3.0, 3.0), (math.sqrt(5) - 1) / 2
    low = -bound if loss(low) < loss(low + 1) else low  # the least is further down
    high = bound if loss(high) < loss(high - 1) else high
    for _ in range(CALIBRATION_STEPS):
        left, right = high - part * (high - low), low + part * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    log_temperature = (low + high) / 2
    if abs(log_temperature) < bound - 1e-3:
        return math.exp(log_temperature)
    temperature = MAX_TEMPERATURE if log_temperature > 0 else 1 / MAX_TEMPERATURE
    log.warning(
        "calibrate: the best temperature is beyond its bound, and %g is used; the head has hardly learned to "
        "tell the validation records apart: train longer, or check the labels",
        temperature,
    )
    return temperature
