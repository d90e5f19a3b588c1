"""The output head as data: what turns hidden states into logits."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (hidden @ weight.T + bias)), with softcap(x) = c * tanh(x / c)."""

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

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


def nothing(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The loss of no positions: zero, and attached to all that a loss is attached to.

    Where ranks hold the head in parts, all of them must bring a gradient of it, or none.
    """
    return hidden.float().sum() + head.weight[:0].float().sum()
