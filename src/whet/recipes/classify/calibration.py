"""Temperature scaling of a classifier, and the logits it is fitted on."""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from whet.data.batches import Batch, one_pass
from whet.data.packing import StepSettings
from whet.data.tokens.examples import Example
from whet.hardware import Precision
from whet.models.language_model import LanguageModel, evaluating
from whet.parallel.gradient_sync import is_sharded
from whet.parallel.process_group import SOLO, World
from whet.training.loss import in_precision

log = logging.getLogger("whet")

# Trained models need 1 to 10. Divided by 100, their probabilities are next to uniform: what asks for more has
# learned nothing. On random labels the best temperature is infinite, which would wipe the head out.
MAX_TEMPERATURE = 100.0
CALIBRATION_STEPS = 80  # of a golden-section search: far below rounding


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
    batches = list(one_pass(examples, steps))
    mine: list[np.ndarray] = []
    with evaluating(model):
        for _, (_, batch), counts in world.rounds(batches, matched=is_sharded(model)):
            with in_precision(precision, model.device):
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
