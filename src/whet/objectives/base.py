"""The contract between an objective and the trainer: weights first, then sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from whet.data.batches import Batch


@dataclass(frozen=True)
class Loss:
    """Each term as a SUM over its units, and numbers to log as sums over the units of the first term."""

    sums: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What is optimised: coefficient * sum / weight, added over terms.

    The trainer adds a term's weights over all micro-batches of a step before it divides, so the gradient does
    not depend on how the step was cut.
    """

    coefficients: Mapping[str, float]
    likelihood: bool  # whether the loss is a mean over tokens of -log p, of which perplexity can be told

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised units of each term in this micro-batch, known on the host before any forward."""

    def loss(self, model: Any, batch: Batch) -> Loss:  # Any: the kind of model this objective is for
        """The sums of this micro-batch."""
