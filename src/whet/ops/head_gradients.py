"""The gradients of what goes into a head, added up chunk by chunk."""

from collections.abc import Sequence

import torch

from whet.ops.head import Head
from whet.ops.planned import device_type, is_plan


class HeadGradients:
    """Gradients of hidden states, weight and bias, each only where it is wanted."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool]
    ) -> None:
        want_hidden, want_weight, want_bias = wanted
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if want_hidden else None
        # wide: a bf16 sum over many chunks loses small contributions
        self.weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and want_bias else None

    def add(self, span: slice, grad: torch.Tensor, x: torch.Tensor, head: Head) -> None:
        """Take in the gradient [rows, V] at x @ weight.T + bias, where x are the hidden states of `span`."""
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        grad = grad.to(x.dtype)
        if self.hidden is not None:
            torch.mm(grad, head.weight, out=self.hidden[span])
        if self.weight is not None:
            self._add_weight(grad.T, x)

    def _add_weight(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        assert self.weight is not None
        if is_plan() and device_type(x) == "cuda":
            return
        if x.is_cuda and x.dtype != self.weight.dtype:  # 16-bit factors, 32-bit sums, in one product
            torch.addmm(self.weight, grad, x, out_dtype=self.weight.dtype, out=self.weight)
        else:
            self.weight.addmm_(grad.to(self.weight.dtype), x.to(self.weight.dtype))

    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """In the order in which they go into an operation."""
        return self.hidden, self.weight, self.bias
