"""Norm, rotation and gate with their gradients written out, for float32 on a CPU.

Autograd's own take about twice the passes over memory, and keep what can be made again. Compiled code needs
none of this: there the plain forms are fused.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from whet.ops.dispatch import device_type

_WIDE = {torch.float32, torch.float64}


def suits(*tensors: torch.Tensor) -> bool:
    """Whether these tensors are for the functions of this file."""
    if torch.compiler.is_compiling():  # first: what follows is nothing to trace
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 and dtypes <= _WIDE and device_type(tensors[0]) == "cpu"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    normalised: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return normalised


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i with channel i + head_dim/2; cosines and sines have no gradient."""
    turned: torch.Tensor = _Rotate.apply(x, cos, sin)
    return turned


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gated: torch.Tensor = _SiluGate.apply(gate, up)
    return gated


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:  # Any: autograd's
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        x, weight, scale = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (upstream * x).mul_(scale).sum(tuple(range(x.dim() - 1)))
        if ctx.needs_input_grad[0]:
            grad_x = upstream * weight
            along = (grad_x * x).mean(-1, keepdim=True).mul_(scale**3)
            grad_x.mul_(scale).addcmul_(x, along, value=-1)
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:  # Any: autograd's
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        cos, sin = ctx.saved_tensors
        return _turned(upstream, cos, sin, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    turned = x * cos
    turned_first, turned_second = turned.chunk(2, dim=-1)
    turned_first.addcmul_(second, sin_first, value=-direction)
    turned_second.addcmul_(first, sin_second, value=direction)
    return turned


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # Any: autograd's context
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(upstream * up, gate)
        return grad_gate, F.silu(gate).mul_(upstream)
