"""The contract between an objective and the trainer: weights first, then sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from whet.data.batches import Batch


@dataclass(frozen=True)
class Loss:
    """Each term as a SUM over its units, and numbers to log as sums over the units of the first term."""

    sums: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)  # metrics that are sums over another term's units
    outputs: torch.Tensor | None = None  # what the objective's own `summarise` reads, a row for each example


def frozen_models(objective: "Objective") -> list[Any]:  # Any: models of the kind this objective is for
    """The models that an objective asks and does not train: teachers, a reference."""
    return [model for model in getattr(objective, "frozen_models", ()) if isinstance(model, nn.Module)]


class Objective(Protocol):
    """What is optimised: coefficient * sum / weight, added over terms.

    The trainer adds a term's weights over all micro-batches of a step before it divides, so the gradient does
    not depend on how the step was cut. With `reports`, {metric: {term: share}}, an objective names metrics
    that are sums of the means of several terms.
    """

    coefficients: Mapping[str, float]
    # It may also have `auxiliary`: terms that are not about the data, such as those on routers, and that
    # are in no evaluation; and `per_micro_batch`: the terms that are no sums over units, and so depend on
    # how the step was cut after all.

    @property
    def heads(self) -> nn.Module | None:
        """What trains beside the model: in checkpoints, never in a saved model."""

    @property
    def likelihood(self) -> bool | str:
        """Whether the loss, or which metric, is a mean over tokens of -log p: perplexity is told of it."""

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised units of each term in this micro-batch, known on the host before any forward."""

    def loss(self, model: Any, batch: Batch) -> Loss:  # Any: the kind of model this objective is for
        """The sums of this micro-batch."""
