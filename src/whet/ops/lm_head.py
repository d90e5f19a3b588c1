"""The output head, which turns hidden states into logits, and the accumulation of its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths, device_type, is_planning


@dataclass(frozen=True)
class Head:
    """An output head: logits = softcap(scale * (hidden @ weight.T + bias)), softcap(x) = c * tanh(x / c)."""

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    paths: Paths = FAST  # the fast paths of its model, used by the losses

    def transform(self, projected: torch.Tensor) -> torch.Tensor:
        """Apply the scale and the softcap to projected hidden states."""
        logits = projected if self.scale == 1.0 else projected * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def tempered(self, temperature: float) -> "Head":
        """Return the head whose logits are those of this head divided by a temperature."""
        if temperature == 1.0:
            return self
        softcap = None if self.softcap is None else self.softcap / temperature
        return replace(self, scale=self.scale / temperature, softcap=softcap)


def head_operands(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return hidden states in the dtype of the projection, the weight and the bias.

    Without gradients the head is detached, because a custom autograd function would otherwise be asked for
    the gradient of a trained head.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if torch.is_grad_enabled():
        return hidden, head.weight, head.bias
    return hidden, head.weight.detach(), None if head.bias is None else head.bias.detach()


def full_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Compute the full logits [N, V] of hidden states [N, D] by plain PyTorch, in float32 or wider."""
    hidden, weight, bias = head_operands(hidden, head)
    with torch.autocast(hidden.device.type, enabled=False):
        projected = F.linear(hidden, weight.to(hidden.dtype))
        logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
        return head.transform(logits if bias is None else logits + bias)


def zero_loss(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Return a loss of 0 for a batch without positions, connected to the hidden states and the head.

    With a sharded head, either every rank or no rank must compute its gradient.
    """
    return hidden.float().sum() + head.weight[:0].float().sum()


class HeadGradients:
    """Accumulates the gradients of hidden states, weight and bias, as far as they are needed."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs_grad: Sequence[bool],
    ) -> None:
        needs_hidden, needs_weight, needs_bias = needs_grad
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needs_hidden else None
        # float32, because a bf16 sum over many chunks loses small contributions
        self.weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None

    def add(self, span: slice, grad: torch.Tensor, x: torch.Tensor, head: Head) -> None:
        """Accumulate the gradient [rows, V] at x @ weight.T + bias, with x the hidden states of `span`."""
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        grad = grad.to(x.dtype)
        if self.hidden is not None:
            torch.mm(grad, head.weight, out=self.hidden[span])
        if self.weight is not None:
            self._add_weight(grad.T, x)

    def _add_weight(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        assert self.weight is not None
        if is_planning() and device_type(x) == "cuda":
            return
        if x.is_cuda and x.dtype != self.weight.dtype:  # 16-bit inputs, 32-bit accumulation, in one matmul
            torch.addmm(self.weight, grad, x, out_dtype=self.weight.dtype, out=self.weight)
        else:
            self.weight.addmm_(grad.to(self.weight.dtype), x.to(self.weight.dtype))

    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of hidden states, weight and bias, or None for those that are not needed."""
        return self.hidden, self.weight, self.bias
