"""`whet diagnose`: the first batch of a run on every number format that the device has."""

import logging
from typing import Any

import torch

from whet.analysis.precision import Diagnosis, Examination
from whet.config.sections import RunConfig
from whet.data.batches import Batch
from whet.errors import ConfigError
from whet.models.tabular import TabularModel
from whet.objectives.base import Objective
from whet.training.evaluation import total_weights
from whet.training.run import assembled

log = logging.getLogger("whet")

MOST_LOGITS = 2**25  # of a language model: those of its first positions


def diagnose(config: RunConfig) -> Diagnosis:
    """Build a run in fp32, take its first micro-batch, and compare."""
    if config.method.kind == "qlora":
        raise ConfigError(
            "whet diagnose compares number formats, and a 4-bit base has one of its own",
            hint="set method.kind to lora",
        )
    run = config.run.model_copy(update={"precision": "fp32", "compile": False, "grad_checkpoint": False})
    with assembled(config.model_copy(update={"run": run})) as work:
        batch = next(work.stream)[0].to(work.model.device)
        return examine(work.model, work.objective, batch)


def examine(model: Any, objective: Objective, batch: Batch) -> Diagnosis:  # Any: as the objective wants it
    """One batch of an objective on a model whose weights are fp32."""
    if getattr(objective, "heads", None) is not None:
        log.info("diagnose: what the objective trains beside the model is left out")
    weights = total_weights(objective, [batch])

    def loss(model: Any, batch: Batch) -> torch.Tensor:  # Any: as above
        sums = objective.loss(model, batch).sums
        terms = [objective.coefficients[t] / weights[t] * value for t, value in sums.items() if weights[t]]
        return torch.stack(terms).sum()

    tabular = isinstance(model, TabularModel)
    readout = _outputs if tabular else _logits
    return Examination(model, batch, loss, cut="decide" if tabular else "hidden", readout=readout).diagnose()


def _outputs(_: Any, outputs: torch.Tensor) -> torch.Tensor:  # Any: a model
    return outputs


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:  # Any: a language model
    rows = hidden.flatten(0, -2)
    weight = model.head().weight
    return model.logits(rows[: max(1, MOST_LOGITS // weight.shape[0])].to(weight.dtype))
