"""Linear layers that can be computed together: those that read one input, and a gated feed-forward."""

import torch
from torch import nn


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
