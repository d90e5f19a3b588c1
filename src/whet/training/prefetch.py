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
    began: "Mark"  # where its work starts in the device's queue
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


class Mark:
    """A moment in the queue of a device: a GPU reaches it when all that was queued before is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: "Mark") -> float | None:
        """Seconds on the device's own clock; None where the host computes, and its clock is right.

        Both must have been reached.
        """
        if self._event is None or later._event is None:
            return None
        return self._event.elapsed_time(later._event) / 1000


class Reading:
    """Numbers and vectors on their way from the device, of which nobody has to wait for yet."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, pin_memory=True).copy_(flat, non_blocking=True)
        else:
            self._host = flat.cpu()
        self.arrived = Mark(flat.device)

    def values(self) -> list[Any]:  # Any: a number, or the list of a vector's numbers
        """All of them, as soon as they are there."""
        self.arrived.wait()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]
