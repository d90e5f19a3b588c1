"""Linear layers with fp8 matmuls, forward and backward, and one scale per tensor.

Inputs and weights are quantized to e4m3, gradients to e5m2, which has the wider range. Each scale is a power
of two, so scaling is exact. It brings the largest magnitude just below the maximum of the format. Matmuls
accumulate in 32 bits and return bf16. The input is saved for the backward pass in fp8.
"""

from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.dispatch import can_build_kernels
from whet.ops.kernels.custom_op import register_operation

FP8_MULTIPLE = 16  # the kernels require every matmul dimension to be a multiple of this
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., in] @ weight [out, in].T + bias, computed in fp8.

    `in` and `out` must be multiples of 16. The result has the dtype that `F.linear` would return.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        product: torch.Tensor = _FP8MatMul.apply(x.reshape(-1, x.shape[-1]), weight)
        y = product.view(*x.shape[:-1], -1).to(dtype)
        return y if bias is None else y + bias.to(dtype)


class _FP8MatMul(torch.autograd.Function):
    """x W' and its gradients, by fp8 matmuls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # Any: autograd's context
        scale, weight_scale = _scale(x, _FORWARD), _scale(weight, _FORWARD)
        fp8_x, transposed = quantize_both_layouts(x, scale, _FORWARD)
        ctx.save_for_backward(transposed, scale, weight)
        ctx.dtype = x.dtype
        fp8_weight = (weight / weight_scale.to(weight.dtype)).to(_FORWARD)
        return _scaled_matmul(fp8_x, fp8_weight.T, scale, weight_scale, fast=True)[: x.shape[0]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        transposed, scale, weight = ctx.saved_tensors
        grad_scale, weight_scale = _scale(grad, _BACKWARD), _scale(weight, _FORWARD)
        fp8_grad, grad_transposed = quantize_both_layouts(grad, grad_scale, _BACKWARD)
        weight_transposed = quantize_transposed(weight, weight_scale, _FORWARD)
        grad_x = _scaled_matmul(fp8_grad, weight_transposed.T, grad_scale, weight_scale)[: grad.shape[0]]
        grad_weight = _scaled_matmul(grad_transposed, transposed.T, grad_scale, scale)
        return grad_x.to(ctx.dtype), grad_weight.to(weight.dtype)


def _scale(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the power of two by which to divide the tensor so that it fills the range of an fp8 dtype."""
    largest = tensor.detach().abs().amax().float()
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=2.0**-100) / torch.finfo(dtype).max)))


def _padded_rows(rows: int) -> int:
    return rows + -rows % FP8_MULTIPLE


# The kernels require a row-major left operand and a column-major right operand, so each matrix is needed in
# both layouts. Compiled code writes the transposed copy inefficiently, so this is a custom operation.
@register_operation(
    lambda matrix, _, dtype: (
        matrix.new_empty(_padded_rows(matrix.shape[0]), matrix.shape[1], dtype=dtype),
        matrix.new_empty(matrix.shape[1], _padded_rows(matrix.shape[0]), dtype=dtype),
    )
)
def quantize_both_layouts(
    matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrix / scale in fp8, and its transpose. Zero rows pad the row count to a multiple of 16.

    NaN stays NaN. Infinity stays infinity or becomes NaN.
    """
    rows, width = matrix.shape
    if matrix.is_cuda and can_build_kernels():
        from whet.ops.kernels.fp8_triton import quantize_on_gpu

        quantized = matrix.new_empty(_padded_rows(rows), width, dtype=dtype)
        transposed = matrix.new_empty(width, _padded_rows(rows), dtype=dtype)
        quantize_on_gpu(matrix.contiguous(), scale, transposed, quantized)
        return quantized, transposed
    quantized = F.pad(matrix / scale.to(matrix.dtype), (0, 0, 0, -rows % FP8_MULTIPLE)).to(dtype)
    return quantized, quantized.T.contiguous()


@register_operation(lambda matrix, _, dtype: matrix.new_empty(matrix.shape[1], matrix.shape[0], dtype=dtype))
def quantize_transposed(matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the transpose of matrix / scale in fp8, for a matrix that needs no padding."""
    if matrix.is_cuda and can_build_kernels():
        from whet.ops.kernels.fp8_triton import quantize_on_gpu

        transposed = matrix.new_empty(matrix.shape[1], matrix.shape[0], dtype=dtype)
        quantize_on_gpu(matrix.contiguous(), scale, transposed, None)
        return transposed
    return (matrix / scale.to(matrix.dtype)).to(dtype).T.contiguous()


def _scaled_matmul(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    *,
    fast: bool = False,
) -> torch.Tensor:
    return torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
