"""The gradients of a gated feed-forward layer with adapters, in one pass over its widest tensors."""

import torch

from whet.ops.kernels import kernels_work
from whet.ops.operation import operation
from whet.ops.planned import device_type, is_plan

_MOST = 64  # ranks: what a program adds up stays in registers


def suits(x: torch.Tensor, dtype: torch.dtype, ranks: tuple[int, ...]) -> bool:
    """Whether a layer that reads x and computes in this dtype is for the function of this file."""
    if not torch.is_grad_enabled() or dtype.itemsize != 2 or max(ranks) > _MOST:
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda and _kernels_work()
    return device_type(x) == "cuda" and (is_plan() or kernels_work())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernels_work() -> bool:
    return kernels_work()


def _unfilled(
    gate: torch.Tensor,
    up: torch.Tensor,
    _grad: torch.Tensor,
    low: torch.Tensor,
    grad_low: torch.Tensor,
    _rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = gate.new_empty(gate.shape[1], low.shape[1] + grad_low.shape[1], dtype=torch.float32)
    return torch.empty_like(gate), torch.empty_like(up), sums


@operation(_unfilled)
def gated_gradients(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor,
    grad_low: torch.Tensor,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up [N, D], from that of y = silu(gate) * up, and what adapters need of them.

    That is [D, ranks]: gate's gradient' times the first `rank` columns of `low`, up's times the others, and
    y' `grad_low`. Neither y nor the gradients are read again for it.
    """
    if is_plan():
        return _unfilled(gate, up, grad, low, grad_low, rank)
    from whet.ops.gated_triton import gated_gradients_on_gpu

    return gated_gradients_on_gpu(gate, up, grad, low, grad_low, rank)
