"""Linear layers that are quick for the few rows of decoding, too."""

import torch
import torch.nn.functional as F
from torch import nn

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer."""
        if self.fp8 and torch.is_grad_enabled():
            return fp8_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)
