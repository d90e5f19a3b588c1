"""Prefetching: queue the forward and backward pass of the next step before reading the metrics of this one.

No weight changes between two updates, so the next gradients can be queued while the host waits for metrics.
A GPU is then never idle between steps. The data position and the random state from before a prefetched step
are stored, so that a checkpoint or a stop can cancel the prefetch without a trace.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from whet.data.batches import Step, StepStream
from whet.hardware import Precision
from whet.ops.dispatch import Paths
from whet.parallel.process_group import World

if TYPE_CHECKING:
    from whet.training.step import TrainStep


@dataclass(frozen=True)
class ComputedStep:
    """A step whose gradients are computed or queued, but not yet applied."""

    step: Step
    sums: dict[str, torch.Tensor]  # on the device: the loss and the objective's metrics
    started: "DeviceEvent"  # recorded before the step's first kernel
    position: dict[str, Any] | None = None  # of the stream before this step; Any: JSON values
    rng_state: tuple[torch.Tensor, ...] = ()  # `forward_rng_state` before this step


@dataclass(frozen=True)
class AppliedStep:
    """The results of a step after its update."""

    metrics: dict[str, Any]  # loss, metrics of the objective, skipped, loss_scale; Any: numbers or lists
    norm: float  # of the gradients, before clipping
    skipped: bool  # the loss or a gradient is non-finite, and no weight changed
    device_seconds: float | None  # by the device's clock; None without CUDA


def supports_prefetch(paths: Paths, device: torch.device, precision: Precision, world: World) -> bool:
    """Return whether steps may be prefetched on a device.

    A CPU gains nothing, fp16 may have to compute a step twice, and several ranks must agree between steps.
    """
    return paths.prefetch and device.type == "cuda" and precision.compute != torch.float16 and world.size == 1


class StepQueue:
    """Computes the gradients of a stream's steps, optionally one step before they are needed."""

    def __init__(self, stream: StepStream, train_step: "TrainStep") -> None:
        self.stream = stream
        self.train_step = train_step
        self.prefetched: ComputedStep | None = None

    def next_step(self) -> ComputedStep:
        """Return the next step with its gradients; raises StopIteration at the end of the stream."""
        computed, self.prefetched = self.prefetched or self._compute(), None
        return computed

    def prefetch(self) -> None:
        """Compute the gradients of the next step now, if there is one."""
        try:
            self.prefetched = self._compute()
        except StopIteration:
            self.prefetched = None

    def compute(self, step: Step) -> ComputedStep:
        """Compute the gradients of a step that is not from the stream."""
        started = DeviceEvent(self.train_step.device)
        return ComputedStep(step, self.train_step.gradients(step), started)

    def apply(
        self, computed: ComputedStep, *, lr: float, before_update: Callable[[], None], prefetch: bool
    ) -> AppliedStep:
        """Update the weights, and return the metrics of the step.

        An fp16 overflow repeats the step with a smaller loss scale. With `prefetch`, the next step is queued
        before the metrics are read.
        """
        train_step, loss_scale = self.train_step, self.train_step.loss_scale
        scale_before = loss_scale.value
        pending = train_step.update(computed.sums, lr=lr, before_update=before_update)
        if prefetch:
            self.prefetch()
        metrics, norm, skipped = pending.read()
        while skipped and loss_scale.shrink_after(metrics["loss"]):
            sums = train_step.gradients(computed.step)
            pending = train_step.update(sums, lr=lr, before_update=before_update)
            metrics, norm, skipped = pending.read()
        if skipped:
            loss_scale.value = scale_before  # the loss scale was not the cause
            metrics["skipped"] = True
        else:
            loss_scale.note_good_step()
        if train_step.precision.compute == torch.float16:
            metrics["loss_scale"] = loss_scale.value
        device_seconds = computed.started.seconds_until(pending.results.completed)
        return AppliedStep(metrics, norm, skipped, device_seconds)

    def cancel(self) -> None:
        """Drop a prefetched step, and restore the data position and random state from before it."""
        if self.prefetched is not None:
            self.train_step.clear_gradients()
            self.rewind(self.prefetched)
            restore_forward_rng_state(self.train_step.device, self.prefetched.rng_state)
            self.prefetched = None

    def rewind(self, computed: ComputedStep) -> None:
        """Move the stream back to before a step."""
        if computed.position is not None:
            self.stream.seek(computed.position)

    def _compute(self) -> ComputedStep:
        device, world = self.train_step.device, self.train_step.world
        started, rng_state = DeviceEvent(device), forward_rng_state(device)
        position = self.stream.state()
        with world.watchdog.long_operation("preparing a step"):  # may shuffle an epoch or generate rollouts
            step = next(self.stream)
        return ComputedStep(step, self.train_step.gradients(step), started, position, rng_state)


def forward_rng_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of the random generators that a forward pass uses."""
    device_states = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *device_states)


def restore_forward_rng_state(device: torch.device, state: tuple[torch.Tensor, ...]) -> None:
    """Restore what `forward_rng_state` returned."""
    torch.set_rng_state(state[0])
    for device_state in state[1:]:
        torch.cuda.set_rng_state(device_state, device)


class DeviceEvent:
    """A CUDA event on the current stream; on other devices, which do not queue work, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has completed all work queued before the event."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: "DeviceEvent") -> float | None:
        """Return the seconds between two completed events by the device's clock; None without CUDA."""
        if self._event is None or later._event is None:
            return None
        return self._event.elapsed_time(later._event) / 1000


class HostCopy:
    """An asynchronous copy of tensors from the device to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, pin_memory=True).copy_(flat, non_blocking=True)
        else:
            self._host = flat.cpu()
        self.completed = DeviceEvent(flat.device)

    def values(self) -> list[Any]:  # Any: a number, or a list of numbers
        """Wait for the copy and return its values, one entry per tensor."""
        self.completed.wait()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]


class PendingUpdate:
    """An optimizer update that the device may still be computing."""

    def __init__(self, results: HostCopy, names: Sequence[str], world: World) -> None:
        self.results = results
        self._names = names
        self._world = world

    def read(self) -> tuple[dict[str, Any], float, bool]:  # Any: numbers or lists of numbers
        """Wait for the update; return its metrics, its gradient norm and whether it was skipped."""
        skipped, norm, *values = self.results.values()
        return self._world.sum_values(dict(zip(self._names, values, strict=True))), norm, bool(skipped)


class StepClock:
    """Measures the duration of steps and of the run.

    A step ends when the device has completed it. The host may notice this late, while it queues the next
    step. The delay counts towards the next step.
    """

    def __init__(self) -> None:
        self.run_start = self.step_end = time.perf_counter()

    def start(self, elapsed_s: float) -> None:
        """Start the clock of a run that took `elapsed_s` seconds before it was resumed."""
        self.run_start = time.perf_counter() - elapsed_s

    def start_step(self, *, prefetched: bool) -> float:
        """Return the start time of the next step; a prefetched step starts when the previous one ends."""
        return self.step_end if prefetched else time.perf_counter()

    def end_step(self, start: float, device_seconds: float | None) -> tuple[float, float]:
        """Return the seconds of a step and of the run; `device_seconds` is measured by the device."""
        end = time.perf_counter()
        if device_seconds is not None:
            end = min(end, start + device_seconds)
        self.step_end = end
        return end - start, end - self.run_start
