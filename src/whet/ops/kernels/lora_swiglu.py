"""SwiGLU with LoRA adapters, and its gradients, in one pass each over the widest tensors of the layer."""

import torch

from whet.ops.dispatch import can_build_kernels, device_type, is_planning
from whet.ops.kernels.custom_op import register_operation

_MAX_RANK = 32  # with higher ranks the kernels become compute-bound and slower than separate small matmuls
_TARGET_PROGRAMS = 4224  # target number of programs of the gradient kernel, if there are enough rows
GRADIENT_TILE = 32, 64  # rows and columns


def is_supported(x: torch.Tensor, dtype: torch.dtype, ranks: tuple[int, ...]) -> bool:
    """Whether the kernels of this module support a layer with input x that computes in this dtype."""
    if dtype.itemsize != 2 or max(ranks) > _MAX_RANK:
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda and _kernels_work()
    return device_type(x) == "cuda" and (is_planning() or can_build_kernels())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernels_work() -> bool:
    return can_build_kernels()


@register_operation(lambda gate, *_: torch.empty_like(gate))
def gated_output(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor
) -> torch.Tensor:
    """Return silu(gate + low_gate B_gate') * (up + low_up B_up') [N, D].

    `gate` and `up` are outputs of the base layers. `low` [N, ranks] is x A', with the columns of the gate
    adapter first. The updates are added in float32, so none of their precision is lost.
    """
    if is_planning():
        return torch.empty_like(gate)
    from whet.ops.kernels.lora_swiglu_triton import gated_output_on_gpu

    return gated_output_on_gpu(gate, up, low, b_gate, b_up)


def _empty_gradients(
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
    """Return the number of rows per program of the gradient kernel, and a buffer for its partial sums."""
    rows, columns = GRADIENT_TILE
    count, size = gate.shape
    row_blocks = -(-_TARGET_PROGRAMS // -(-size // columns))
    rows_per_program = max(1, -(-count // (row_blocks * rows))) * rows
    ranks = low.shape[1] + grad_low.shape[1]
    return rows_per_program, gate.new_empty(-(-count // rows_per_program), size, ranks, dtype=torch.float32)


@register_operation(_empty_gradients)
def gated_gradients(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    grad_low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up [N, D], and the sums that the adapters' gradients need [D, ranks].

    `grad` is the gradient of y = gated_output(...). The sums are grad_gate' low_gate, grad_up' low_up and
    y' grad_low, side by side. They are computed without reading y or the gradients again.
    """
    if is_planning():
        _, sums = partial_sums(gate, low, grad_low)
        return torch.empty_like(gate), torch.empty_like(up), sums.sum(0)
    from whet.ops.kernels.lora_swiglu_triton import gated_gradients_on_gpu

    return gated_gradients_on_gpu(gate, up, grad, low, b_gate, b_up, grad_low)
