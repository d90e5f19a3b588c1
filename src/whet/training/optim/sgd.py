"""Stochastic gradient descent with momentum."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class SGD(MaskedOptimizer):
    """SGD with the update rule of torch.optim.SGD.

    The fused kernel of torch 2.13 does not update 16-bit weights on a CPU.

    Args:
        params: The parameters, or parameter groups as for torch's optimizers.
        lr: The learning rate.
        momentum: The momentum factor; 0 for none.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: The weight decay, added to the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return a zero momentum buffer, if the group has momentum."""
        return {"momentum_buffer": torch.zeros_like(p)} if group["momentum"] else {}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Step along the gradient with weight decay, with momentum or Nesterov momentum if configured."""
        direction = grad.add(p, alpha=group["weight_decay"])
        if momentum := group["momentum"]:
            buffer = state["momentum_buffer"].mul_(momentum).add_(direction)
            direction = direction.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
        p.sub_(direction, alpha=group["lr"])
