"""Temperature scaling of a classifier, and the logits that the temperature is fitted to."""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from whet.data.batches import Batch, iter_batches_once
from whet.data.packing import StepSettings
from whet.data.tokens.examples import Example
from whet.hardware import Precision
from whet.models.language_model import LanguageModel, eval_mode
from whet.parallel.gradient_sync import is_sharded
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.training.loss import autocast_context

log = logging.getLogger("whet")

# Trained models need 1 to 10. Logits divided by 100 give almost uniform probabilities: a model that needs
# more has learned nothing. On random labels the best temperature is infinite, which would erase the head.
MAX_TEMPERATURE = 100.0
CALIBRATION_STEPS = 80  # of a golden-section search; its error is then far below rounding


def compute_outputs(
    compute: Callable[[LanguageModel, Batch], torch.Tensor],
    model: LanguageModel,
    examples: Sequence[Example],
    steps: StepSettings,
    *,
    precision: Precision,
    world: World = SINGLE_PROCESS,
) -> np.ndarray:
    """Return one row of outputs per example, in order. Each rank computes its share of the batches.

    Args:
        compute: Returns the outputs of a batch, [examples, columns], such as the objective's logits.
        model: Passed to `compute`.
        examples: The examples to compute outputs for.
        steps: The settings that split the examples into micro-batches.
        precision: The dtypes of the forward pass.
        world: The ranks that share the work.

    Returns:
        A float32 array, [examples, columns].
    """
    batches = list(iter_batches_once(examples, steps))
    local_rows: list[np.ndarray] = []
    with eval_mode(model):
        for _, (_, batch), counts in world.local_items(batches, pad=is_sharded(model)):
            with autocast_context(precision, model.device):
                rows = compute(model, batch.to(model.device)).float().cpu().numpy()
            local_rows += [rows] if counts else []
    batch_rows = world.gather_in_order(local_rows, len(batches))
    outputs = np.zeros((len(examples), batch_rows[0].shape[1]), dtype=np.float32)
    for (indices, _), rows in zip(batches, batch_rows, strict=True):
        outputs[indices] = rows
    return outputs


def fit_temperature(logits: np.ndarray, labels: np.ndarray, *, multi_label: bool) -> float:
    """Return the temperature that minimizes the loss of the labels, by a golden-section search.

    It is between 1 / MAX_TEMPERATURE and MAX_TEMPERATURE. If every prediction is correct the loss has no
    minimum, and the temperature is 1.
    """
    is_correct = ((logits > 0) == labels) if multi_label else logits.argmax(1) == labels
    if is_correct.all():  # never the case for soft labels
        log.warning(
            "calibrate: every validation record is classified correctly, so no temperature can be fitted"
        )
        return 1.0
    exact_logits = torch.from_numpy(logits).double()
    targets = torch.from_numpy(labels).double() if multi_label else torch.from_numpy(labels).long()

    def loss(log_temperature: float) -> float:
        scaled = exact_logits / math.exp(log_temperature)
        if multi_label:
            return F.binary_cross_entropy_with_logits(scaled, targets).item()
        return F.cross_entropy(scaled, targets).item()

    bound, (low, high), ratio = math.log(MAX_TEMPERATURE), (-3.0, 3.0), (math.sqrt(5) - 1) / 2
    low = -bound if loss(low) < loss(low + 1) else low  # the minimum is below the initial interval
    high = bound if loss(high) < loss(high - 1) else high
    for _ in range(CALIBRATION_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    log_temperature = (low + high) / 2
    if abs(log_temperature) < bound - 1e-3:
        return math.exp(log_temperature)
    temperature = MAX_TEMPERATURE if log_temperature > 0 else 1 / MAX_TEMPERATURE
    log.warning(
        "calibrate: the best temperature is out of bounds, and %g is used instead; the head hardly separates "
        "the classes of the validation records: train longer, or check the labels",
        temperature,
    )
    return temperature
