"""`whet diagnose`: the gradients of a run's first micro-batch in every dtype of the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.errors import ConfigError
from whet.objectives.objective import Objective
from whet.recipes.quality.tabular_model import TabularModel
from whet.recipes.registry import complete_config
from whet.runs.assemble import open_assembly
from whet.studies.dtype_comparison import Diagnosis, DtypeComparison
from whet.training.loss import total_weights

MAX_LOGITS = 2**25  # logits to compare; longer batches are truncated to their first positions


def diagnose(config: RunConfig) -> Diagnosis:
    """Build a run in fp32 and compare the gradients of its first micro-batch between dtypes."""
    config = complete_config(config)
    if config.method.kind == "qlora":
        raise ConfigError(
            "whet diagnose compares dtypes, which is not possible with the 4-bit base weights of qlora",
            hint="set method.kind to lora",
        )
    run = config.run.model_copy(update={"precision": "fp32", "compile": False, "grad_checkpoint": False})
    with open_assembly(config.model_copy(update={"run": run})) as work:
        batch = next(work.stream)[0].to(work.model.device)
        return diagnose_batch(work.model, work.objective, batch)


def diagnose_batch(
    model: Any, objective: Objective, batch: Batch
) -> Diagnosis:  # Any: the model type that the objective expects
    """Compare the gradients of one batch between dtypes; the weights of the model must be fp32."""
    loss = _MeanLoss(objective, total_weights(objective, [batch]))
    tabular = isinstance(model, TabularModel)
    readout = _outputs if tabular else _logits
    boundary = "decide" if tabular else "hidden"
    return DtypeComparison(model, batch, loss, boundary=boundary, readout=readout).diagnose()


@dataclass(frozen=True)
class _MeanLoss:
    """The mean loss as the trainer computes it. It is an object, so that deepcopy copies the objective."""

    objective: Objective
    weights: dict[str, float]

    @property
    def heads(self) -> nn.Module | None:
        """The modules that the objective trains in addition to the model, or None."""
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
    return model.logits(rows[: max(1, MAX_LOGITS // weight.shape[0])].to(weight.dtype))
