"""Adam and AdamW in plain torch operations, for the reference path."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class PlainAdam(MaskedOptimizer):
    """Adam with the update rule and state of torch.optim.Adam, or with `decoupled` of torch.optim.AdamW.

    As in the fused kernels, arithmetic is in float32 or wider, and moments have the dtype of the weights.
    """

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.decoupled = decoupled

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return two zero moments and a step count."""
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device), **moments}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Apply weight decay and the Adam update with bias-corrected moments."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        wide = torch.promote_types(p.dtype, torch.float32)
        weight, grad = p.to(wide), grad.to(wide)
        if self.decoupled:
            weight = weight * (1 - lr * decay)
        else:
            grad = grad + decay * weight
        step = state["step"].add_(1).double()  # in float32, 1 - 0.999 has only four correct digits
        mean = beta1 * state["exp_avg"].to(wide) + (1 - beta1) * grad
        square = beta2 * state["exp_avg_sq"].to(wide) + (1 - beta2) * grad.square()
        root = square.sqrt() / (1 - beta2**step).sqrt().to(wide)
        p.copy_(weight - lr * (mean / (1 - beta1**step).to(wide)) / (root + group["eps"]))
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
