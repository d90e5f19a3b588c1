"""Tokens sorted by expert, and their products with their experts' weights: one call for all experts."""

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths

_ALIGNMENT = 16  # bytes that a row of each operand must be a multiple of


class Groups(NamedTuple):
    """Where the tokens of a layer go: its slots, one for each token and choice, sorted by expert."""

    order: torch.Tensor  # [slots]: which (token, choice) each sorted slot is
    places: torch.Tensor  # [slots]: the sorted slot of each (token, choice)
    ends: torch.Tensor  # [experts], int32: where the slots of each expert end
    copies: int  # choices a token has


def sort_by_expert(chosen: torch.Tensor, experts: int) -> Groups:
    """The slots of choices [tokens, top_k]; nothing here waits for the device."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    slots = torch.arange(len(flat), device=flat.device)
    every = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(flat.index_select(0, order), every, right=True).int()
    return Groups(order, torch.empty_like(order).scatter_(0, order, slots), ends, chosen.shape[1])


def dispatch(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The rows of x [tokens, D], once for each choice, sorted by expert: [slots, D]."""
    return _Dispatch.apply(x, groups)


def combine(y: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """For each token the sum of its slots of y [slots, D], each times its weight [tokens, top_k]."""
    each = _Unsort.apply(y, groups)
    return (each.unflatten(0, weights.shape) * weights[..., None]).sum(1)


class _Dispatch(torch.autograd.Function):
    """A gather both ways: the gradients of a token's copies are gathered and added, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups) -> torch.Tensor:  # Any: torch's context
        ctx.groups = groups
        return x.index_select(0, groups.order // groups.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        groups: Groups = ctx.groups
        gathered = gradients[0].index_select(0, groups.places)
        return gathered.unflatten(0, (-1, groups.copies)).sum(1), None


class _Unsort(torch.autograd.Function):
    """The slots in the order of the tokens; back, in that of the experts."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, groups: Groups) -> torch.Tensor:  # Any: torch's context
        ctx.groups = groups
        return y.index_select(0, groups.places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        return gradients[0].index_select(0, ctx.groups.order), None


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row of x [rows, in], sorted by expert, through the weight [experts, out, in] of its expert."""
    # torch's kernel is not one that autocast knows
    mixed = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if mixed else x.dtype
    x, weight = x.to(dtype).contiguous(), weight.to(dtype).contiguous()
    if grouped_problem(x.device.type, dtype, weight.shape[1:]) is not None:
        return loop_linear(x, weight, ends)
    product = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return _PlainGradient.apply(product)


def loop_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What grouped_linear computes, expert by expert: where the kernel does not run, and to compare with.

    It waits for the device, to learn how many rows each expert has.
    """
    bounds = [0, *ends.tolist()]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), weight, strict=True)])


class _PlainGradient(torch.autograd.Function):
    """The identity. The kernel's backward refuses gradients that are expanded, such as those of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - Any: torch's context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - Any: as above
        return gradients[0].contiguous()


def grouped_problem(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Why experts of these sizes are computed one by one on such a device, or None: in one call."""
    odd = [size for size in sizes if size * dtype.itemsize % _ALIGNMENT]
    if odd:
        return f"torch's grouped_mm takes rows of a multiple of {_ALIGNMENT} bytes, not {odd[0]} x {dtype}"
    return _kernel_problem(device, dtype)


@functools.cache
def _kernel_problem(device: str, dtype: torch.dtype) -> str | None:
    """Why torch's kernel does not run, forward and backward: tried once, on one small product."""
    if not hasattr(F, "grouped_mm"):
        return "this version of torch has no grouped_mm"
    try:
        # a recomputed layer may call this first: its hooks must not count what the trial saves
        own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with own_hooks, torch.enable_grad(), torch.autocast(device, enabled=False):
            x = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([5, 16], device=device, dtype=torch.int32)
            F.grouped_mm(x, weight.transpose(1, 2), offs=ends).backward(torch.ones_like(x))
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's grouped_mm does not run here: {str(error).strip().splitlines()[0]}"
    return None


def describe_grouped(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], paths: Paths = FAST
) -> str:
    """One phrase for the log: how the products of experts are computed, and why."""
    problem = grouped_problem(device.type, dtype, sizes) if paths.grouped_experts else "the reference path"
    return "one grouped product for all" if problem is None else f"one by one ({problem})"
