"""Adafactor (arXiv 1804.04235): second moments of a matrix from one row and one column of averages."""

from collections.abc import Iterable
from typing import Any

import torch

from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup

BETA2_DECAY = -0.8
SMALLEST_SCALE = 1e-3  # a parameter at zero moves as one of this size
LARGEST_UPDATE = 1.0  # root mean square of an update before it is scaled
EPS = torch.finfo(torch.float32).eps


class Adafactor(MaskedOptimizer):
    """torch.optim.Adafactor's rule with torch's constants, computed in float32.

    torch's own reads three numbers a tensor back to the host and counts its steps there, so it can be neither
    queued nor masked.
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
        """A row and a column of averages for a matrix (each of a stack of them), all of them for a vector."""
        state = {"step": torch.zeros((), device=p.device)}
        if p.dim() > 1:
            state["row_var"] = torch.zeros_like(p[..., :1], dtype=torch.float32)
            state["col_var"] = torch.zeros_like(p[..., :1, :], dtype=torch.float32)
        else:
            state["variance"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Step relative to the size of the weights: by lr times their root mean square, at most."""
        grad, step = grad.float(), state["step"].add_(1)
        fresh = step**BETA2_DECAY  # the share of this gradient in the averages: all of it at first
        relative = step.rsqrt().clamp(max=group["lr"])
        scale = _rms(p.float()).clamp(min=SMALLEST_SCALE) * relative
        if p.dim() > 1:
            row, column = state["row_var"], state["col_var"]
            row.lerp_(grad.square().mean(-1, keepdim=True), fresh)
            column.lerp_(grad.square().mean(-2, keepdim=True), fresh)
            variance = row * column / row.mean(-2, keepdim=True).clamp(min=EPS)
        else:
            variance = state["variance"].lerp_(grad.square(), fresh)
        update = grad * variance.clamp(min=EPS**2).rsqrt()
        update *= scale / (_rms(update) / LARGEST_UPDATE).clamp(min=1)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.norm() / tensor.numel() ** 0.5
