"""Lion (arXiv 2302.06675): the sign of an average of gradients, with decoupled weight decay."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.config.optim import LION_BETAS
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class Lion(MaskedOptimizer):
    """One moment a weight, every update of the same size."""

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
        """An average of gradients."""
        return {"exp_avg": torch.zeros_like(p)}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Step along the sign of an average quick to take in this gradient; keep one that is slow to."""
        average, (fast, slow) = state["exp_avg"], group["betas"]
        direction = average.lerp(grad, 1 - fast).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        average.lerp_(grad, 1 - slow)
