"""The output head as data: what turns hidden states into logits, and where its gradients are summed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths, device_type, is_plan


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (hidden @ weight.T + bias)), with softcap(x) = c * tanh(x / c)."""

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    paths: Paths = FAST  # of its model: how losses are computed from it

    def transform(self, projected: torch.Tensor) -> torch.Tensor:
        """Scale and cap already projected hidden states."""
        logits = projected if self.scale == 1.0 else projected * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def tempered(self, temperature: float) -> "Head":
        """The head whose logits are those of this one, divided by a temperature."""
        if temperature == 1.0:
            return self
        softcap = None if self.softcap is None else self.softcap / temperature
        return replace(self, scale=self.scale / temperature, softcap=softcap)


def operands(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Hidden states in the dtype they are projected in, the weight and the bias.

    Without gradients the head is detached: autograd would still ask for the gradient of a trained one.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if torch.is_grad_enabled():
        return hidden, head.weight, head.bias
    return hidden, head.weight.detach(), None if head.bias is None else head.bias.detach()


def full_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """All logits [N, V] of hidden states [N, D] at once, in float32 or wider: plain torch."""
    hidden, weight, bias = operands(hidden, head)
    with torch.autocast(hidden.device.type, enabled=False):
        projected = F.linear(hidden, weight.to(hidden.dtype))
        logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
        return head.transform(logits if bias is None else logits + bias)


def nothing(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The loss of no positions: zero, and attached to all that a loss is attached to.

    Where ranks hold the head in parts, all of them must bring a gradient of it, or none.
    """
    return hidden.float().sum() + head.weight[:0].float().sum()


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
