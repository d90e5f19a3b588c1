"""`whet diagnose`: the first batch of a run on every number format that the device has."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.errors import ConfigError
from whet.objectives.objective import Objective
from whet.recipes.quality.tabular_model import TabularModel
from whet.runs.assemble import assembled
from whet.studies.dtype_comparison import Diagnosis, Examination
from whet.training.loss import total_weights

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
    loss = _MeanLoss(objective, total_weights(objective, [batch]))
    tabular = isinstance(model, TabularModel)
    readout = _outputs if tabular else _logits
    return Examination(model, batch, loss, cut="decide" if tabular else "hidden", readout=readout).diagnose()


@dataclass(frozen=True)
class _MeanLoss:
    """An objective's loss as the trainer computes it: an object, so that it is copied with the objective."""

    objective: Objective
    weights: dict[str, float]

    @property
    def heads(self) -> nn.Module | None:
        """What the objective trains beside the model."""
        return getattr(self.objective, "heads", None)

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:  # Any: as above
        sums, weights = self.objective.loss(model, batch).sums, self.weights
        return torch.stack(
            [self.objective.coefficients[t] / weights[t] * value for t, value in sums.items() if weights[t]]
        ).sum()


def _outputs(_: Any, outputs: torch.Tensor) -> torch.Tensor:  # Any: a model
    return outputs


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:  # Any: a language model
    rows = hidden.flatten(0, -2)
    weight = model.head().weight
    return model.logits(rows[: max(1, MOST_LOGITS // weight.shape[0])].to(weight.dtype))
