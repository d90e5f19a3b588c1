"""The gradients of what goes into a head, added up chunk by chunk."""

from collections.abc import Sequence

import torch

from whet.ops.head import Head


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
            self.bias += grad.sum(0)
        wide, grad = grad.dtype, grad.to(x.dtype)
        if self.hidden is not None:
            torch.mm(grad, head.weight, out=self.hidden[span])
        if self.weight is not None:
            self.weight.addmm_(grad.T.to(wide), x.to(wide))

    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """In the order in which they go into an operation."""
        return self.hidden, self.weight, self.bias
