"""Linear layers, fast also for the few rows of decoding; sibling layers that read one input are fused."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.dispatch import chosen_paths
from whet.ops.fp8 import fp8_linear

# on two cores W x' takes half the time of x W' up to here and as long at 64 rows; on one core both are alike
_FEW_ROWS = 48


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias.

    For a few float32 rows on a CPU that need no gradient, as (W x')', which cores share better.
    Not where gradients are on: the result lies transposed in memory, and dropout draws in memory's order.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if not 1 < rows <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    y = torch.mm(weight, x.reshape(rows, -1).T).T.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """torch's linear layer, by the function above; where `fp8` is set, training multiplies in 8 bits."""

    fp8 = False

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.paths = chosen_paths()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer."""
        if self.fp8 and self.paths.fp8 and torch.is_grad_enabled():
            return fp8_linear(x, self.weight, self.bias)
        if not self.paths.decoding:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def project(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """Each layer's output; layers that can compute theirs together (adapters) do so."""
    together = getattr(layers[0], "together", None)
    found = together(x, layers) if together is not None else None
    return [layer(x) for layer in layers] if found is None else list(found)


def gated(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> torch.Tensor | None:
    """down(silu(gate(x)) * up(x)), if these layers (adapters) can compute it at once."""
    at_once = getattr(gate, "gated", None)
    found: torch.Tensor | None = None if at_once is None else at_once(x, up, down)
    return found
