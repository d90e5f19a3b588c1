"""Linear layers that read one input, such as q, k and v or gate and up."""

import torch
from torch import nn


def project(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """Each layer's output; layers that can compute theirs together (adapters) do so."""
    together = getattr(layers[0], "together", None)
    found = together(x, layers) if together is not None else None
    return [layer(x) for layer in layers] if found is None else list(found)
