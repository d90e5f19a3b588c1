"""Feed-forward layers."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.spec import FeedForwardSpec


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: FeedForwardSpec, *, d_model: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, spec.width, bias=spec.bias)
        self.up_proj = nn.Linear(d_model, spec.width, bias=spec.bias)
        self.down_proj = nn.Linear(spec.width, d_model, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position on its own."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
