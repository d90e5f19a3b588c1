"""Gradients of a step before its update: a GPU may be given the next ones while the host reads numbers.

Between two updates no weight changes, so the forward and backward pass of the next step can be queued before
the numbers of this one are waited for. The device is then never idle between steps. Where the run stood
before is kept: whoever needs it (a checkpoint, a stop) gets it back, as if nothing had been computed ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whet.data.batches import Batch


@dataclass(frozen=True)
class Computed:
    """A step whose gradients are computed, or queued, and whose update is not."""

    micro_batches: Sequence[Batch]
    sums: dict[str, torch.Tensor]  # on the device: the loss, and the objective's metrics
    position: dict[str, Any] | None = None  # Any: a stream's own; where it stood before this step
    random: tuple[torch.Tensor, ...] = ()  # what `device_random` was before this step


def device_random(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The random streams that a forward pass draws from."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *own)


def restore_device_random(device: torch.device, state: tuple[torch.Tensor, ...]) -> None:
    """Set them to what they were."""
    torch.set_rng_state(state[0])
    for own in state[1:]:
        torch.cuda.set_rng_state(own, device)


class Reading:
    """Numbers and vectors on their way from the device, of which nobody has to wait for yet."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        self._arrived: torch.cuda.Event | None = None
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, pin_memory=True).copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flat.device))
        else:
            self._host = flat.cpu()

    def values(self) -> list[Any]:  # Any: a number, or the list of a vector's numbers
        """All of them, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]
