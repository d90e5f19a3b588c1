"""The contract between an objective and the trainer: weights first, then sums."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from whet.data.batches import Batch

if TYPE_CHECKING:
    from whet.models.mtp import PredictionHeads


@dataclass(frozen=True)
class Loss:
    """Each term as a SUM over its units, and numbers to log as sums over the units of the first term."""

    sums: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)  # metrics that are sums over another term's units
    outputs: torch.Tensor | None = None  # what the objective's own `summarise` reads, a row for each example


class FrozenForward(NamedTuple):
    """A forward pass without gradients that a loss makes of each batch."""

    model: Any  # Any: the kind of model this objective is for
    adapters: bool = True  # False: of the trained model with its adapters off


class Objective(abc.ABC):
    """What is optimised: coefficient * sum / weight, added over terms.

    The trainer adds a term's weights over all micro-batches of a step before it divides, so the gradient does
    not depend on how the step was cut. A subclass sets `coefficients` and defines `weights` and `loss`; all
    else has a default.
    """

    # term -> factor of its mean in the loss; metrics are means over the units of the first term
    coefficients: Mapping[str, float] = {"loss": 1.0}
    # trains beside the model: in checkpoints, never in a saved model
    heads: nn.Module | None = None
    # whether the loss, or which metric, is a mean of -log p over tokens: its perplexity is reported
    likelihood: bool | str = False
    # terms that are not about the data, such as those of routers, and are in no evaluation
    auxiliary: frozenset[str] = frozenset()
    # terms that are not sums over units, and so depend on how a step is cut into micro-batches
    per_micro_batch: frozenset[str] = frozenset()
    # metric -> {term: share}: metrics that are sums of the means of several terms
    reports: Mapping[str, Mapping[str, float]] = {}

    unit: str = "tok"  # what throughput is counted in
    # metric -> label: what a progress line shows beside the loss
    progress: Mapping[str, str] = {}

    # what a step costs, for plans and MFU
    reads_lm_head: bool = True  # supervised positions meet the output head
    recomputes_logits: bool = False  # logits are computed again for their gradient
    prediction_heads: "PredictionHeads | None" = None  # layers that predict further tokens

    @abc.abstractmethod
    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the supervised units of each term in this micro-batch, without a forward pass."""

    @abc.abstractmethod
    def loss(self, model: Any, batch: Batch) -> Loss:  # Any: the kind of model this objective is for
        """Return the sums of this micro-batch."""

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return metrics of a whole evaluation, from the `outputs` of its batches."""
        return {}

    def frozen_forwards(self, model: Any) -> Sequence[FrozenForward]:  # Any: as above
        """Return the passes without gradients that the loss makes of each batch (teachers, a reference)."""
        return ()

    @property
    def parts(self) -> "Mapping[str, Objective]":
        """The objectives that this one adds up, each on batches of its own; none for a plain objective."""
        return {}
