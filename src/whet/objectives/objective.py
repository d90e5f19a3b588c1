"""Base class of objectives: the interface between a loss and the trainer."""

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
    """The loss of a micro-batch: each term as a SUM over its units (such as tokens), not a mean.

    Args:
        sums: The loss terms.
        metrics: Metrics to log, as sums over the units of the first term.
        units: For metrics that are sums over the units of another term, the name of that term.
        outputs: The inputs of the objective's `summarise`, one row per example.
    """

    sums: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    outputs: torch.Tensor | None = None


class FrozenForward(NamedTuple):
    """A forward pass without gradients that a loss runs on each batch."""

    model: Any  # Any: the type of model that the objective supports
    adapters: bool = True  # False: the trained model with its adapters disabled


class Objective(abc.ABC):
    """Base class of objectives. The loss is the sum over terms of coefficient * sum / weight.

    The trainer adds up a term's weights over all micro-batches of a step before it divides, so the gradient
    does not depend on how the step is split into micro-batches. A subclass sets `coefficients` and defines
    `weights` and `loss`. Everything else has a default.
    """

    # term -> factor of its mean in the loss; metrics are averaged over the units of the first term
    coefficients: Mapping[str, float] = {"loss": 1.0}
    # trained with the model: part of checkpoints, but not of a saved model
    heads: nn.Module | None = None
    # True if the loss is the mean of -log p over tokens, or the name of a metric that is; adds perplexity
    likelihood: bool | str = False
    # terms that do not depend on targets, such as router losses; evaluations leave them out
    auxiliary: frozenset[str] = frozenset()
    # terms that are not sums over units, and depend on how a step is split into micro-batches
    per_micro_batch: frozenset[str] = frozenset()
    # metric -> {term: share}: metrics that are sums of the means of several terms
    reports: Mapping[str, Mapping[str, float]] = {}

    # whether the loss uses `Batch.weights`; a batch with weights is an error otherwise
    uses_token_weights: bool = False

    unit: str = "tok"  # unit of throughput
    # metric -> label, shown next to the loss in progress lines
    progress: Mapping[str, str] = {}

    # properties that determine the FLOPs of a step, for plans and MFU
    reads_lm_head: bool = True  # the output head is applied to supervised positions
    recomputes_logits: bool = False  # the backward pass computes logits again
    prediction_heads: "PredictionHeads | None" = None  # heads of multi-token prediction

    @abc.abstractmethod
    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of units of each term in a micro-batch, without a forward pass.

        Units are what the term is averaged over, such as supervised tokens or pairs.
        """

    @abc.abstractmethod
    def loss(self, model: Any, batch: Batch) -> Loss:  # Any: the type of model that the objective supports
        """Return the loss terms and metrics of a micro-batch as sums over units.

        Args:
            model: The model to train.
            batch: The micro-batch, on the device of the model.
        """

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return metrics of an evaluation that need all its batches.

        Args:
            outputs: The `outputs` of each batch, in the order of the batches.
            batches: The batches of the evaluation.
        """
        return {}

    def frozen_forwards(self, model: Any) -> Sequence[FrozenForward]:  # Any: as above
        """Return the forward passes of frozen models, such as teachers, that the loss runs per batch."""
        return ()

    @property
    def parts(self) -> "Mapping[str, Objective]":
        """The objectives that this one adds up, by name; empty unless it is a mix."""
        return {}
