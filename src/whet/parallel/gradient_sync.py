"""Sum gradients over the ranks, overlapping the last backward pass; flatten gradients into one vector."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from whet.errors import RunError
from whet.parallel.process_group import World

T = TypeVar("T", bound=torch.Tensor)
_BUCKET_ELEMENTS = 2**23  # large enough for full network bandwidth, small enough to start early


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module's weights are sharded, so that all ranks must take part in a forward pass."""
    return any(isinstance(p, DTensor) for p in module.parameters())


class _Bucket:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.pending = len(self.parameters)  # parameters whose gradient is not final
        self.vector: torch.Tensor | None = None
        self.work: Any = None  # Any: torch's handle


class GradientReducer:
    """Sums the gradients of replicated (not sharded) parameters over the ranks.

    Each rank has divided its loss by the weight of the complete step, so sums need no further division. They
    are computed in float32, in buckets: a bucket is sent as soon as its gradients are final, but always in
    the same order, so that the collectives of all ranks match.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.world = world
        self.parameters = [p for p in parameters if not isinstance(p, DTensor)]
        self.buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next = 0  # index of the first bucket that has not been sent
        self._is_last_backward = False
        if world.dp_size > 1:
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(self._on_gradient)

    def expect_last_backward(self) -> None:
        """Declare that the next backward pass is the last of its step, so that its gradients are final."""
        self._is_last_backward = bool(self.buckets)

    def finish(self) -> None:
        """Send the remaining buckets, and wait until every gradient is the sum over all ranks."""
        if self.world.dp_size == 1 or not self.parameters:
            return
        if not self.buckets:
            self._create_buckets()
        elif any(p.grad is not None and p not in self._bucket_of for p in self.parameters):
            raise RunError(
                "a parameter has its first gradient after the first step, which is not supported on several "
                "processes"
            )
        self._send(force=True)
        for number, bucket in enumerate(self.buckets, start=1):
            with self.world.watchdog.collective(f"all-reduce of gradients {number} of {len(self.buckets)}"):
                bucket.work.wait()
            assert bucket.vector is not None
            parts = bucket.vector.split([p.numel() for p in bucket.parameters])
            for p, part in zip(bucket.parameters, parts, strict=True):
                p.grad = part.view_as(p).to(p.dtype)
            bucket.vector = bucket.work = None
            bucket.pending = len(bucket.parameters)
        self._next, self._is_last_backward = 0, False

    def _create_buckets(self) -> None:
        """Group the parameters that have a gradient on any rank, in the first step."""
        flags = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32)
        dist.all_reduce(flags)
        used = [p for p, flag in zip(self.parameters, flags.tolist(), strict=True) if flag]
        group: list[nn.Parameter] = []
        for p in reversed(used):  # a backward pass ends at the first layer
            group.append(p)
            if sum(each.numel() for each in group) >= _BUCKET_ELEMENTS:
                self.buckets.append(_Bucket(group))
                group = []
        if group:
            self.buckets.append(_Bucket(group))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _on_gradient(self, p: torch.Tensor) -> None:
        bucket = self._bucket_of.get(p) if self._is_last_backward else None  # type: ignore[call-overload]
        if bucket is not None:
            bucket.pending -= 1
            self._send()

    def _send(self, *, force: bool = False) -> None:
        """Start the all-reduce of all buckets in order, up to the first that is incomplete unless forced."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.pending > 0 and not force:
                return
            parts = [
                (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().flatten()
                for p in bucket.parameters
            ]
            bucket.vector = torch.cat(parts)
            if self.world.rank % self.world.tp_size:  # the first tensor-parallel rank has the same gradients
                bucket.vector.zero_()
            bucket.work = dist.all_reduce(bucket.vector, async_op=True)
            self._next += 1


def group_by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors by device mesh (None for plain tensors), because foreach kernels accept no mixture."""
    groups: dict[Any, list[T]] = {}  # Any: a mesh, or None
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())


def flat_gradients(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the gradients of the parameters as one float32 vector, with zeros for missing gradients.

    If every worker divides its loss by the weight of the complete step, the sum of these vectors over all
    workers is the gradient of the step.
    """
    return torch.cat(
        [
            (torch.zeros_like(each) if each.grad is None else each.grad).detach().float().flatten()
            for each in parameters
        ]
    )


def set_flat_gradients(parameters: Iterable[torch.nn.Parameter], vector: torch.Tensor) -> None:
    """Set the gradient of each parameter from a vector in the layout of `flat_gradients`.

    Args:
        parameters: the parameters, in the same order as for `flat_gradients`.
        vector: one finite value per element of the parameters.

    Raises:
        RunError: the vector has the wrong size or a non-finite value; no gradient was changed.
    """
    parameters = list(parameters)
    size = sum(each.numel() for each in parameters)
    if vector.shape != (size,):
        raise RunError(
            f"the parameters have {size} elements, and the gradient vector has the shape {list(vector.shape)}"
        )
    if not vector.isfinite().all():
        raise RunError("a worker's gradient is not finite: no weight was changed")
    for each, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        each.grad = part.view_as(each).to(each.device, each.dtype, copy=True)
