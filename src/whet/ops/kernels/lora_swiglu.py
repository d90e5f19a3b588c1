"""A gated feed-forward layer with adapters, and its gradients, in one pass each over its widest tensors."""

import torch

from whet.ops.dispatch import device_type, is_plan, kernels_work
from whet.ops.kernels.custom_op import operation

_MOST = 32  # ranks: with more, kernels wait for their own arithmetic longer than small products take
_PROGRAMS = 4224  # about as many for the gradients, where there are enough rows
GRADIENT_TILE = 32, 64  # rows and columns


def suits(x: torch.Tensor, dtype: torch.dtype, ranks: tuple[int, ...]) -> bool:
    """Whether a layer that reads x and computes in this dtype is for the functions of this file."""
    if dtype.itemsize != 2 or max(ranks) > _MOST:
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda and _kernels_work()
    return device_type(x) == "cuda" and (is_plan() or kernels_work())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernels_work() -> bool:
    return kernels_work()


@operation(lambda gate, *_: torch.empty_like(gate))
def gated_output(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor
) -> torch.Tensor:
    """silu(gate + low B') * (up + low B') [N, D]; of `low` [N, ranks] the first columns are gate's.

    Gate and up are without their updates, which are added in float32: nothing of them is rounded away.
    """
    if is_plan():
        return torch.empty_like(gate)
    from whet.ops.kernels.lora_swiglu_triton import gated_output_on_gpu

    return gated_output_on_gpu(gate, up, low, b_gate, b_up)


def _unfilled(
    gate: torch.Tensor,
    up: torch.Tensor,
    _grad: torch.Tensor,
    low: torch.Tensor,
    _b_gate: torch.Tensor,
    _b_up: torch.Tensor,
    grad_low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = gate.new_empty(gate.shape[1], low.shape[1] + grad_low.shape[1], dtype=torch.float32)
    return torch.empty_like(gate), torch.empty_like(up), sums


def partial_sums(gate: torch.Tensor, low: torch.Tensor, grad_low: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How many rows a program of the gradients has, and room for what each of them adds up."""
    rows, columns = GRADIENT_TILE
    count, size = gate.shape
    shares = -(-_PROGRAMS // -(-size // columns))
    share = max(1, -(-count // (shares * rows))) * rows
    ranks = low.shape[1] + grad_low.shape[1]
    return share, gate.new_empty(-(-count // share), size, ranks, dtype=torch.float32)


@operation(_unfilled)
def gated_gradients(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    grad_low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up [N, D], from that of y = gated_output(...), and what adapters need.

    That is [D, ranks]: gate's gradient' times its columns of `low`, up's times its own, and y' `grad_low`.
    Neither y nor the gradients are read again for it.
    """
    if is_plan():
        _, partial = partial_sums(gate, low, grad_low)
        return torch.empty_like(gate), torch.empty_like(up), partial.sum(0)
    from whet.ops.kernels.lora_swiglu_triton import gated_gradients_on_gpu

    return gated_gradients_on_gpu(gate, up, grad, low, b_gate, b_up, grad_low)
