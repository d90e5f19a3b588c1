"""Distrust: cross-entropy weighted by the authority and provenance entropy of each text."""

import math
from typing import Literal

import numpy as np
import torch

from whet.data.batches import Batch
from whet.errors import DataError
from whet.models.language_model import LanguageModel
from whet.objectives.objective import Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.logprobs import token_logprobs

COLUMNS = ("auth_weight", "prov_entropy")
MAX_AUTHORITY = 0.99
ALPHA_RANGE = (2.3, 3.0)


def distrust(auth_weight: float, prov_entropy: float, alpha: float = 2.7) -> float:
    """Return alpha * d^2 with d = ln(1 - auth_weight + 1e-8) + prov_entropy, as published.

    The function is not monotone: it is 0 at prov_entropy = -ln(1 - auth_weight) and rises on both sides.

    Args:
        auth_weight: The authority of a text, from 0 to 0.99.
        prov_entropy: The provenance entropy of a text, at least 0.
        alpha: The factor, from 2.3 to 3.0.

    Raises:
        DataError: If an argument is out of range or not a single number.
    """
    for name, value in {"auth_weight": auth_weight, "prov_entropy": prov_entropy, "alpha": alpha}.items():
        if np.ndim(value):
            raise DataError(f"{name} must be a single number")
    if not 0 <= auth_weight <= MAX_AUTHORITY:
        raise DataError(f"auth_weight must be from 0 to {MAX_AUTHORITY}, not {auth_weight:g}")
    if not prov_entropy >= 0:
        raise DataError(f"prov_entropy must be >= 0, not {prov_entropy:g}")
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise DataError(f"alpha must be from {low} to {high}, not {alpha:g}")
    return alpha * (math.log(1 - auth_weight + 1e-8) + prov_entropy) ** 2


def squared_distance(values: torch.Tensor) -> torch.Tensor:
    """Return d^2 of rows [..., (auth_weight, prov_entropy)]; also in fp32 it is positive for (0, 0)."""
    return (torch.log1p(1e-8 - values[..., 0]) + values[..., 1]).square()


class Distrust(Objective):
    """Cross-entropy in which each example has the weight 1 - strength + strength * d^2 / mean(d^2).

    The mean is over the training set, so a step with one example is weighted, too; alpha cancels. With
    `mode="additive"` the loss is the published total, cross-entropy + scale * distrust. That term does not
    depend on the weights of the model, so its gradient is zero and only the reported loss changes.

    Args:
        mean_square: The mean of d^2 over the training set.
        mode: Whether to weight the loss of each example, or to add the published term.
        strength: How much the weights depend on d^2; 0 for plain cross-entropy.
        alpha: The factor of the additive term.
        scale: The weight of the additive term.
    """

    likelihood = "cross_entropy"

    def __init__(
        self,
        mean_square: float,
        *,
        mode: Literal["weight", "additive"] = "weight",
        strength: float = 1.0,
        alpha: float = 2.7,
        scale: float = 0.6,
    ) -> None:
        if mean_square <= 0:
            raise DataError("all records have a distrust of 0, so they cannot be weighted by it")
        self.mean_square = mean_square
        self.mode = mode
        self.strength = strength
        self.alpha = alpha
        self.coefficients = {"loss": 1.0} | ({"distrust": scale} if mode == "additive" else {})

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of supervised tokens; the additive term is averaged over examples."""
        tokens = {"loss": float(batch.supervised)}
        return tokens if self.mode == "weight" else {**tokens, "distrust": float(len(batch.origins))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of this micro-batch."""
        squares = squared_distance(batch.column("values"))
        example_weights = 1 - self.strength + self.strength * squares / self.mean_square
        tokens = (model.states(batch), model.head(), batch.supervised_targets)
        if self.mode == "additive":
            cross_entropy = linear_cross_entropy(*tokens)
            term = self.alpha * squares.sum().to(cross_entropy.dtype)
            return Loss({"loss": cross_entropy, "distrust": term}, {"cross_entropy": cross_entropy})
        token_weights = example_weights.index_select(0, batch.examples)
        if torch.is_grad_enabled():
            return Loss({"loss": linear_cross_entropy(*tokens, weights=token_weights)})
        losses = -token_logprobs(*tokens)  # evaluations also report the cross-entropy
        return Loss({"loss": (token_weights * losses).sum()}, {"cross_entropy": losses.sum()})


def calibrate_scale(squares: torch.Tensor, *, alpha: float) -> float:
    """Return the scale, from 0.001 to 1, that makes the additive term about as large as a loss of 5."""
    return min(1.0, max(0.001, 5.0 / (alpha * float(squares.mean()))))
