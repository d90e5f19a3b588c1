"""Linear layers that multiply in 8 bits, forward and backward, with one scale a tensor.

Inputs and weights are rounded to e4m3, gradients to e5m2, which has the wider range. A scale is a power of
two (so it rounds nothing itself) that brings the largest magnitude just under the format's largest number.
Sums are taken in 32 bits, results are bf16. What the backward pass needs of the input is kept in 8 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.dispatch import kernels_work
from whet.ops.kernels.custom_op import operation

MULTIPLE = 16  # of every side of a product: what the kernels take
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias; `in` and `out` are multiples of 16.

    The result has the dtype that torch's own linear layer gives it.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        found: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
        y = found.view(*x.shape[:-1], -1).to(dtype)
        return y if bias is None else y + bias.to(dtype)


class _Product(torch.autograd.Function):
    """x W', and its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # Any: autograd's context
        scale, own_scale = _scale(x, _FORWARD), _scale(weight, _FORWARD)
        rounded, turned = both_ways(x, scale, _FORWARD)
        ctx.save_for_backward(turned, scale, weight)
        ctx.dtype = x.dtype
        own = (weight / own_scale.to(weight.dtype)).to(_FORWARD)
        return _multiply(rounded, own.T, scale, own_scale, fast=True)[: x.shape[0]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        turned, scale, weight = ctx.saved_tensors
        grad_scale, own_scale = _scale(grad, _BACKWARD), _scale(weight, _FORWARD)
        upstream, upstream_turned = both_ways(grad, grad_scale, _BACKWARD)
        own_turned = turned_only(weight, own_scale, _FORWARD)
        grad_x = _multiply(upstream, own_turned.T, grad_scale, own_scale)[: grad.shape[0]]
        grad_weight = _multiply(upstream_turned, turned.T, grad_scale, scale)
        return grad_x.to(ctx.dtype), grad_weight.to(weight.dtype)


def _scale(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The power of two over which the tensor fills the range of an 8-bit format."""
    largest = tensor.detach().abs().amax().float()
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=2.0**-100) / torch.finfo(dtype).max)))


def _padded(rows: int) -> int:
    return rows + -rows % MULTIPLE


# The kernels want rows next to one another on their left side and columns on their right: each matrix is
# needed both ways. A compiler writes the second copy badly, so it is not asked to.
@operation(
    lambda matrix, _, dtype: (
        matrix.new_empty(_padded(matrix.shape[0]), matrix.shape[1], dtype=dtype),
        matrix.new_empty(matrix.shape[1], _padded(matrix.shape[0]), dtype=dtype),
    )
)
def both_ways(
    matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix over a power of two in 8 bits, and the same turned; rows are a multiple of 16, by zeros.

    NaN and infinity stay what they are, or become NaN.
    """
    rows, width = matrix.shape
    if matrix.is_cuda and kernels_work():
        from whet.ops.kernels.fp8_triton import turned_on_gpu

        same = matrix.new_empty(_padded(rows), width, dtype=dtype)
        turned = matrix.new_empty(width, _padded(rows), dtype=dtype)
        turned_on_gpu(matrix.contiguous(), scale, turned, same)
        return same, turned
    same = F.pad(matrix / scale.to(matrix.dtype), (0, 0, 0, -rows % MULTIPLE)).to(dtype)
    return same, same.T.contiguous()


@operation(lambda matrix, _, dtype: matrix.new_empty(matrix.shape[1], matrix.shape[0], dtype=dtype))
def turned_only(matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The second of those, for a matrix that needs no more rows."""
    if matrix.is_cuda and kernels_work():
        from whet.ops.kernels.fp8_triton import turned_on_gpu

        turned = matrix.new_empty(matrix.shape[1], matrix.shape[0], dtype=dtype)
        turned_on_gpu(matrix.contiguous(), scale, turned, None)
        return turned
    return (matrix / scale.to(matrix.dtype)).to(dtype).T.contiguous()


def _multiply(
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
