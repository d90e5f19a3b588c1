"""Linear layers that multiply in 8 bits, forward and backward, with one scale a tensor.

Inputs and weights are rounded to e4m3, gradients to e5m2, which has the wider range. A scale is a power of
two (so it rounds nothing itself) that brings the largest magnitude just under the format's largest number.
Sums are taken in 32 bits, results are bf16. What the backward pass needs of the input is kept in 8 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F

MULTIPLE = 16  # of every side of a product: what the kernels take
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias; `in` and `out` are multiples of 16.

    The result has the dtype that torch's own linear layer gives it.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        flat = F.pad(flat, (0, 0, 0, -rows % MULTIPLE))
        found: torch.Tensor = _Product.apply(flat, weight)
        y = found[:rows].view(*x.shape[:-1], -1).to(dtype)
        return y if bias is None else y + bias.to(dtype)


class _Product(torch.autograd.Function):
    """x W', and its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # Any: autograd's context
        rounded, scale = _rounded(x, _FORWARD)
        ctx.save_for_backward(rounded, scale, weight)
        ctx.dtype = x.dtype
        own, own_scale = _rounded(weight, _FORWARD)
        return _multiply(rounded, own.T, scale, own_scale, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        x, scale, weight = ctx.saved_tensors
        upstream, grad_scale = _rounded(grad, _BACKWARD)
        own, own_scale = _rounded(weight, _FORWARD)
        grad_x = _multiply(upstream, _by_columns(own), grad_scale, own_scale)
        grad_weight = _multiply(upstream.T.contiguous(), _by_columns(x), grad_scale, scale)
        return grad_x.to(ctx.dtype), grad_weight.to(weight.dtype)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor over a power of two, in 8 bits, and that power; NaN and infinity stay what they are."""
    largest = tensor.detach().abs().amax().float()
    scale = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=2.0**-100) / torch.finfo(dtype).max)))
    return (tensor / scale.to(tensor.dtype)).to(dtype), scale


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix, with columns next to one another in memory: how the kernels read their right side."""
    return matrix.T.contiguous().T


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
