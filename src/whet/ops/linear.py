"""Linear layers that are also fast for the few rows of decoding, and fusion of layers with a shared input."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.dispatch import current_paths
from whet.ops.fp8 import fp8_linear

# on two cores W x' takes half the time of x W' up to this many rows, and the same time at 64; on one core
# there is no difference
_MAX_DECODING_ROWS = 48


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., in] @ weight [out, in].T + bias.

    For a few float32 rows on a CPU, this computes (W x')', which parallelizes better. It does so only without
    gradients: the result is transposed in memory, and dropout draws in memory order.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if not 1 < rows <= _MAX_DECODING_ROWS:
        return F.linear(x, weight, bias)
    y = torch.mm(weight, x.reshape(rows, -1).T).T.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`nn.Linear` computed by `linear`, or by fp8 matmuls in training if `fp8` is set."""

    fp8 = False

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.paths = current_paths()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in_features]."""
        if self.fp8 and self.paths.fp8 and torch.is_grad_enabled():
            return fp8_linear(x, self.weight, self.bias)
        if not self.paths.decoding:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def project_all(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """Return the output of each layer for the same input. Adapters may compute them in one operation."""
    fused = getattr(layers[0], "forward_siblings", None)
    outputs = fused(x, layers) if fused is not None else None
    return [layer(x) for layer in layers] if outputs is None else list(outputs)


def fused_swiglu(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> torch.Tensor | None:
    """Return down(silu(gate(x)) * up(x)) if the layers (adapters) have a fused implementation, or None."""
    fused = getattr(gate, "forward_swiglu", None)
    output: torch.Tensor | None = None if fused is None else fused(x, up, down)
    return output
