"""Distrust: cross-entropy weighted by how little authority and how much provenance a text has."""

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
    """alpha * d^2 with d = ln(1 - auth_weight + 1e-8) + prov_entropy, as published.

    It is not monotone: it is 0 where prov_entropy = -ln(1 - auth_weight), and rises on both sides of that.
    """
    for name, value in {"auth_weight": auth_weight, "prov_entropy": prov_entropy, "alpha": alpha}.items():
        if np.ndim(value):
            raise DataError(f"{name} must be one number, not several")
    if not 0 <= auth_weight <= MAX_AUTHORITY:
        raise DataError(f"auth_weight must be from 0 to {MAX_AUTHORITY}, not {auth_weight:g}")
    if not prov_entropy >= 0:
        raise DataError(f"prov_entropy must not be negative, and is {prov_entropy:g}")
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise DataError(f"alpha must be from {low} to {high}, not {alpha:g}")
    return alpha * (math.log(1 - auth_weight + 1e-8) + prov_entropy) ** 2


def squared_distance(values: torch.Tensor) -> torch.Tensor:
    """d^2 of each row [auth_weight, prov_entropy]; in fp32, too, that of [0, 0] is above 0."""
    return (torch.log1p(1e-8 - values[..., 0]) + values[..., 1]).square()


class Distrust(Objective):
    """The usual loss, in which each example counts 1 - strength + strength * d^2 / mean(d^2).

    The mean is that of the training set, so that a step of one example is weighted, too; alpha cancels. With
    `mode: additive` the published total is reported instead, CE + scale * distrust: the term does not depend
    on the weights of the model, so its gradient is zero and it changes nothing but the number.
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
            raise DataError("every record has a distrust of 0: there is nothing to weight by")
        self.mean_square = mean_square
        self.mode = mode
        self.strength = strength
        self.alpha = alpha
        self.coefficients = {"loss": 1.0} | ({"distrust": scale} if mode == "additive" else {})

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised tokens: weights are not divided out. The additive term is a mean over examples."""
        tokens = {"loss": float(batch.supervised)}
        return tokens if self.mode == "weight" else {**tokens, "distrust": float(len(batch.origins))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch."""
        squares = squared_distance(batch.column("values"))
        each = 1 - self.strength + self.strength * squares / self.mean_square
        tokens = (model.states(batch), model.head(), batch.supervised_targets)
        if self.mode == "additive":
            summed = linear_cross_entropy(*tokens)
            added = self.alpha * squares.sum().to(summed.dtype)
            return Loss({"loss": summed, "distrust": added}, {"cross_entropy": summed})
        counts = each.index_select(0, batch.examples)
        if torch.is_grad_enabled():
            return Loss({"loss": linear_cross_entropy(*tokens, weights=counts)})
        losses = -token_logprobs(*tokens)  # evaluations also say what the model makes of the text
        return Loss({"loss": (counts * losses).sum()}, {"cross_entropy": losses.sum()})


def calibrated_scale(squares: torch.Tensor, *, alpha: float) -> float:
    """The scale, in [0.001, 1], at which the additive term is about as large as a loss of 5."""
    return min(1.0, max(0.001, 5.0 / (alpha * float(squares.mean()))))
