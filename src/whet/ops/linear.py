"""Linear layers that are quick for the few rows of decoding, too."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

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

    def together(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """The outputs of several layers on one input as one product, where that pays: training on a GPU.

        It is larger than theirs, and so is that of their gradients, which need not be added up either.
        """
        alike = [layer for layer in layers if isinstance(layer, Linear) and layer.joins(self)]
        if not (torch.is_grad_enabled() and joins_on(x.device) and len(alike) == len(layers)):
            return None
        bias = None if self.bias is None else torch.cat([layer.bias for layer in alike])
        joined = F.linear(x, torch.cat([layer.weight for layer in alike]), bias)
        return joined.split([layer.out_features for layer in alike], dim=-1)

    def joins(self, other: "Linear") -> bool:
        """Whether this layer can be computed in one product with another."""
        return (
            self.weight.requires_grad  # to join frozen weights costs as much, and gives less
            and not isinstance(self.weight, DTensor)
            and (self.bias is None) == (other.bias is None)
            and not self.fp8
            and not (self._forward_hooks or self._forward_pre_hooks)  # a hook wants its layer called
        )


def joins_on(device: torch.device) -> bool:
    """Whether joined products are quicker on a device."""
    return device.type == "cuda"
