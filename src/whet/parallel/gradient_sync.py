"""Gradients summed over the ranks while the last backward pass still runs; gradients as one flat vector."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from whet.errors import RunError
from whet.parallel.process_group import World

T = TypeVar("T", bound=torch.Tensor)
_BUCKET_NUMBERS = 2**23  # added up at once: enough to use a network well, few enough to begin early


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks hold parts of a module's weights: then its forward passes have to be made by all."""
    return any(isinstance(p, DTensor) for p in module.parameters())


class _Bucket:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.waits_for = len(self.parameters)
        self.vector: torch.Tensor | None = None
        self.work: Any = None  # Any: torch's handle


class GradientSum:
    """The sum over ranks of the gradients of parameters that every rank has whole.

    Each rank has divided by the weight of the whole step, so sums need no further division. They are made
    in float32, in buckets of fixed order: what is ready early is sent early, and no rank can be in another
    order than the others, whatever it computed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.world = world
        self.parameters = [p for p in parameters if not isinstance(p, DTensor)]
        self.buckets: list[_Bucket] = []
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._next = 0  # the first bucket that is not sent yet
        self._armed = False
        if world.shares > 1:
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(self._ready)

    def expect_last(self) -> None:
        """The next backward pass is the last of its step: what it finishes can be sent."""
        self._armed = bool(self.buckets)

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks."""
        if self.world.shares == 1 or not self.parameters:
            return
        if not self.buckets:
            self._fill()
        elif any(p.grad is not None and p not in self._of for p in self.parameters):
            raise RunError("a weight has its first gradient after the first step: not on several processes")
        self._send(everything=True)
        for number, bucket in enumerate(self.buckets, start=1):
            with self.world.watch.collective(f"the sum of gradients {number} of {len(self.buckets)}"):
                bucket.work.wait()
            assert bucket.vector is not None
            parts = bucket.vector.split([p.numel() for p in bucket.parameters])
            for p, part in zip(bucket.parameters, parts, strict=True):
                p.grad = part.view_as(p).to(p.dtype)
            bucket.vector = bucket.work = None
            bucket.waits_for = len(bucket.parameters)
        self._next, self._armed = 0, False

    def _fill(self) -> None:
        """In the first step: who has a gradient on any rank. The others have none in one process, too."""
        flags = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32)
        dist.all_reduce(flags)
        used = [p for p, flag in zip(self.parameters, flags.tolist(), strict=True) if flag]
        found: list[nn.Parameter] = []
        for p in reversed(used):  # a backward pass ends at the first layer
            found.append(p)
            if sum(each.numel() for each in found) >= _BUCKET_NUMBERS:
                self.buckets.append(_Bucket(found))
                found = []
        if found:
            self.buckets.append(_Bucket(found))
        self._of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _ready(self, p: torch.Tensor) -> None:
        bucket = self._of.get(p) if self._armed else None  # type: ignore[call-overload]
        if bucket is not None:
            bucket.waits_for -= 1
            self._send()

    def _send(self, *, everything: bool = False) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.waits_for > 0 and not everything:
                return
            parts = [
                (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().flatten()
                for p in bucket.parameters
            ]
            bucket.vector = torch.cat(parts)
            if self.world.rank % self.world.tensor:  # it has the same gradients as its neighbour
                bucket.vector.zero_()
            bucket.work = dist.all_reduce(bucket.vector, async_op=True)
            self._next += 1


def by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """Whole tensors, and those that the same ranks hold in parts: torch's kernels take no mixture."""
    found: dict[Any, list[T]] = {}  # Any: a mesh, or None
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


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
