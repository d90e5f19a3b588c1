"""All gradients as one vector, for workers that add them up themselves."""

from collections.abc import Iterable

import torch

from whet.errors import RunError


def flat_gradients(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The gradients of some parameters one after the other, in float32; zeros where there is none.

    Summed over workers, each of which divided by the weight of the whole step, they are the step's gradient.
    """
    return torch.cat(
        [
            (torch.zeros_like(each) if each.grad is None else each.grad).detach().float().flatten()
            for each in parameters
        ]
    )


def set_flat_gradients(parameters: Iterable[torch.nn.Parameter], vector: torch.Tensor) -> None:
    """Give each parameter its part of a vector as `flat_gradients` makes it, which must be finite."""
    parameters = list(parameters)
    size = sum(each.numel() for each in parameters)
    if vector.shape != (size,):
        raise RunError(f"{size} numbers are needed, and the vector has the shape {list(vector.shape)}")
    if not vector.isfinite().all():
        raise RunError("a worker's gradient is not finite: no weight was changed")
    for each, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        each.grad = part.view_as(each).to(each.device, each.dtype, copy=True)
