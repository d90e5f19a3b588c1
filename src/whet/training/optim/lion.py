"""Lion (arXiv 2302.06675): updates by the sign of averaged gradients, with decoupled weight decay."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.config.optim import LION_BETAS
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class Lion(MaskedOptimizer):
    """Lion optimizer: one moment per weight, and updates of equal magnitude.

    Args:
        params: The parameters, or parameter groups as for torch's optimizers.
        lr: The learning rate.
        betas: The decay rates of the average that gives the update, and of the stored average.
        weight_decay: The decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        betas: tuple[float, float] = LION_BETAS,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return a zero average of gradients."""
        return {"exp_avg": torch.zeros_like(p)}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Step along the sign of a fast average of gradients, and update the slow average that is stored."""
        average, (fast, slow) = state["exp_avg"], group["betas"]
        direction = average.lerp(grad, 1 - fast).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        average.lerp_(grad, 1 - slow)
