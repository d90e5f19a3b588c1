"""Adafactor (arXiv 1804.04235): second moments of a matrix factored into a row and a column of averages."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup

BETA2_DECAY = -0.8
MIN_SCALE = 1e-3  # lower bound of a parameter's root mean square, so that zeros can move
MAX_UPDATE_RMS = 1.0  # clipping threshold for the root mean square of the unscaled update
EPS = torch.finfo(torch.float32).eps


class Adafactor(MaskedOptimizer):
    """Adafactor with the update rule and constants of torch.optim.Adafactor, computed in float32.

    torch's implementation reads three values per tensor back to the host and counts steps there, so its step
    can neither be queued nor skipped on the device.

    Args:
        params: The parameters, or parameter groups as for torch's optimizers.
        lr: The learning rate.
        weight_decay: The decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return zero second moments: a row and a column per matrix (or stack of them), or a vector."""
        state = {"step": torch.zeros((), device=p.device)}
        if p.dim() > 1:
            state["row_var"] = torch.zeros_like(p[..., :1], dtype=torch.float32)
            state["col_var"] = torch.zeros_like(p[..., :1, :], dtype=torch.float32)
        else:
            state["variance"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Update by at most lr times the root mean square of the weights."""
        grad, step = grad.float(), state["step"].add_(1)
        gradient_share = step**BETA2_DECAY  # weight of this gradient in the averages; 1 in the first step
        relative_lr = step.rsqrt().clamp(max=group["lr"])
        scale = _rms(p.float()).clamp(min=MIN_SCALE) * relative_lr
        if p.dim() > 1:
            row, column = state["row_var"], state["col_var"]
            row.lerp_(grad.square().mean(-1, keepdim=True), gradient_share)
            column.lerp_(grad.square().mean(-2, keepdim=True), gradient_share)
            variance = row * column / row.mean(-2, keepdim=True).clamp(min=EPS)
        else:
            variance = state["variance"].lerp_(grad.square(), gradient_share)
        update = grad * variance.clamp(min=EPS**2).rsqrt()
        update *= scale / (_rms(update) / MAX_UPDATE_RMS).clamp(min=1)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.norm() / tensor.numel() ** 0.5
