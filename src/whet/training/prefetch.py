"""Gradients of a step before its update: a GPU may be given the next ones while the host reads numbers.

Between two updates no weight changes, so the forward and backward pass of the next step can be queued before
the numbers of this one are waited for. The device is then never idle between steps. Where the run stood
before is kept: whoever needs it (a checkpoint, a stop) gets it back, as if nothing had been computed ahead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from whet.data.batches import Step, StepStream
from whet.parallel.process_group import World

if TYPE_CHECKING:
    from whet.training.step import TrainStep


@dataclass(frozen=True)
class Computed:
    """A step whose gradients are computed, or queued, and whose update is not."""

    step: Step
    sums: dict[str, torch.Tensor]  # on the device: the loss, and the objective's metrics
    began: "Mark"  # where its work starts in the device's queue
    position: dict[str, Any] | None = None  # where the stream stood before this step; Any: JSON values
    random: tuple[torch.Tensor, ...] = ()  # what `device_random` was before this step


class StepQueue:
    """The steps of a stream with their gradients, the next of which may be computed before it is needed."""

    def __init__(self, stream: StepStream, train_step: "TrainStep") -> None:
        self.stream = stream
        self.train_step = train_step
        self.prefetched: Computed | None = None

    def take(self) -> Computed:
        """Return the next step; raises StopIteration where the stream ends."""
        computed, self.prefetched = self.prefetched or self._compute(), None
        return computed

    def prefetch(self) -> None:
        """Compute the next step now, if there is one."""
        try:
            self.prefetched = self._compute()
        except StopIteration:
            self.prefetched = None

    def cancel(self) -> None:
        """Forget what was prefetched: stream, gradients and random numbers are as after the last update."""
        if self.prefetched is not None:
            self.train_step.clear_gradients()
            self.rewind(self.prefetched)
            restore_device_random(self.train_step.device, self.prefetched.random)
            self.prefetched = None

    def rewind(self, computed: Computed) -> None:
        """Put the stream back to before a step."""
        if computed.position is not None:
            self.stream.seek(computed.position)

    def _compute(self) -> Computed:
        device, world = self.train_step.device, self.train_step.world
        began, random = Mark(device), device_random(device)
        position = self.stream.state()
        with world.watch.patiently("preparing a step"):  # an epoch's order, or rollouts
            step = next(self.stream)
        return Computed(step, self.train_step.gradients(step), began, position, random)


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


class PendingUpdate:
    """An update that the device may still be making."""

    def __init__(self, reading: Reading, names: Sequence[str], world: World) -> None:
        self.reading = reading
        self._names = names
        self._world = world

    def read(self) -> tuple[dict[str, Any], float, bool]:  # Any: numbers, or lists of them
        """Wait for its metrics and its gradient norm, and whether it was skipped."""
        skipped, norm, *values = self.reading.values()
        return self._world.sums(dict(zip(self._names, values, strict=True))), norm, bool(skipped)


class StepClock:
    """When steps begin and end: a step ends when the device is done with it, not when the host knows.

    The host learns of it late where it was queueing the next step meanwhile: the time that takes belongs to
    the next step, which would else seem to take none when it is the last.
    """

    def __init__(self) -> None:
        self.began = self.step_ended = time.perf_counter()

    def start(self, elapsed_s: float) -> None:
        """Start a run that has taken some seconds already."""
        self.began = time.perf_counter() - elapsed_s

    def step_began(self, *, prefetched: bool) -> float:
        """Return when the next step began: with the end of the last one where it was queued before."""
        return self.step_ended if prefetched else time.perf_counter()

    def end_step(self, began: float, on_device: float | None) -> tuple[float, float]:
        """Return the seconds of a step and of the run, given the step's seconds on the device if known."""
        ended = time.perf_counter()
        if on_device is not None:
            ended = min(ended, began + on_device)
        self.step_ended = ended
        return ended - began, ended - self.began
