"""Sorting of tokens by expert, and grouped matmuls with the weights of all experts in one call."""

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths

_ALIGNMENT = 16  # the kernel requires rows of a multiple of this many bytes


class Groups(NamedTuple):
    """The assignment of tokens to experts: one slot per token and choice, sorted by expert."""

    order: torch.Tensor  # [slots]: the (token, choice) index of each sorted slot
    sorted_slots: torch.Tensor  # [slots]: the sorted slot of each (token, choice) index
    ends: torch.Tensor  # [experts], int32: the end of each expert's slots
    copies: int  # choices per token (top_k)


def sort_by_expert(chosen: torch.Tensor, experts: int) -> Groups:
    """Sort the chosen experts [tokens, top_k] into slots, without a device synchronization."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    slots = torch.arange(len(flat), device=flat.device)
    expert_ids = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(flat.index_select(0, order), expert_ids, right=True).int()
    return Groups(order, torch.empty_like(order).scatter_(0, order, slots), ends, chosen.shape[1])


def dispatch(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the rows of x [tokens, D], repeated per choice and sorted by expert: [slots, D]."""
    return _Dispatch.apply(x, groups)


def combine(y: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the sum [tokens, D] of each token's slots in y [slots, D], weighted by [tokens, top_k]."""
    by_token = _Unsort.apply(y, groups)
    return (by_token.unflatten(0, weights.shape) * weights[..., None]).sum(1)


class _Dispatch(torch.autograd.Function):
    """Gather by token. The backward pass gathers and sums the copies' gradients in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups) -> torch.Tensor:  # Any: torch's context
        ctx.groups = groups
        return x.index_select(0, groups.order // groups.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        groups: Groups = ctx.groups
        gathered = gradients[0].index_select(0, groups.sorted_slots)
        return gathered.unflatten(0, (-1, groups.copies)).sum(1), None


class _Unsort(torch.autograd.Function):
    """Reorder slots by token. The backward pass reorders gradients by expert."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, groups: Groups) -> torch.Tensor:  # Any: torch's context
        ctx.groups = groups
        return y.index_select(0, groups.sorted_slots)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        return gradients[0].index_select(0, ctx.groups.order), None


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows x [rows, in], sorted by expert, by the weights [experts, out, in] of their experts."""
    # autocast does not cover torch's kernel
    mixed = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if mixed else x.dtype
    x, weight = x.to(dtype).contiguous(), weight.to(dtype).contiguous()
    if grouped_mm_problem(x.device.type, dtype, weight.shape[1:]) is not None:
        return expert_loop_linear(x, weight, ends)
    product = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return _ContiguousGradient.apply(product)


def expert_loop_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute `grouped_linear` expert by expert: the fallback of the kernel, and its test oracle.

    It synchronizes with the device to read the number of rows per expert.
    """
    bounds = [0, *ends.tolist()]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), weight, strict=True)])


class _ContiguousGradient(torch.autograd.Function):
    """The identity with a contiguous gradient: the kernel rejects expanded ones, such as those of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - Any: torch's context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - Any: as above
        return gradients[0].contiguous()


def grouped_mm_problem(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Return why `grouped_mm` cannot be used for experts of these sizes, or None if it can."""
    unaligned = [size for size in sizes if size * dtype.itemsize % _ALIGNMENT]
    if unaligned:
        return (
            f"torch's grouped_mm needs rows of a multiple of {_ALIGNMENT} bytes, not {unaligned[0]} x {dtype}"
        )
    return _kernel_problem(device, dtype)


@functools.cache
def _kernel_problem(device: str, dtype: torch.dtype) -> str | None:
    """Return why torch's kernel does not run, or None. It is tried once, on a small matmul."""
    if not hasattr(F, "grouped_mm"):
        return "this version of torch has no grouped_mm"
    try:
        # the first call may be inside a checkpointed layer, whose hooks must not see the tensors saved here
        identity_hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: tensor
        )
        with identity_hooks, torch.enable_grad(), torch.autocast(device, enabled=False):
            x = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([5, 16], device=device, dtype=torch.int32)
            F.grouped_mm(x, weight.transpose(1, 2), offs=ends).backward(torch.ones_like(x))
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's grouped_mm does not run on this machine: {str(error).strip().splitlines()[0]}"
    return None


def describe_expert_matmuls(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], paths: Paths = FAST
) -> str:
    """Return a phrase for the log that describes how the experts' matmuls are computed, and why."""
    problem = grouped_mm_problem(device.type, dtype, sizes) if paths.grouped_experts else "the reference path"
    return "by one grouped matmul" if problem is None else f"expert by expert ({problem})"
