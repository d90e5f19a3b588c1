"""RMSNorm, RoPE and SwiGLU gate with explicit backward passes, for float32 and float64 on a CPU.

Plain autograd needs about twice the passes over memory and saves tensors that can be recomputed. Compiled
code does not use these functions, because the compiler fuses the plain implementations.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from whet.ops.dispatch import device_type

_DTYPES = {torch.float32, torch.float64}


def is_supported(*tensors: torch.Tensor) -> bool:
    """Whether the functions of this module support these tensors."""
    if torch.compiler.is_compiling():  # checked first, because the rest should not be traced
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 and dtypes <= _DTYPES and device_type(tensors[0]) == "cpu"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension."""
    normalized: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return normalized


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i with channel i + head_dim/2. Cosines and sines get no gradient."""
    rotated: torch.Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    activated: torch.Tensor = _SiluGate.apply(gate, up)
    return activated


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
            projection = (grad_x * x).mean(-1, keepdim=True).mul_(scale**3)
            grad_x.mul_(scale).addcmul_(x, projection, value=-1)
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:  # Any: autograd's
        ctx.save_for_backward(cos, sin)
        return _apply_rotation(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        cos, sin = ctx.saved_tensors
        return _apply_rotation(upstream, cos, sin, -1), None, None


def _apply_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    rotated = x * cos
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin_first, value=-direction)
    rotated_second.addcmul_(first, sin_second, value=direction)
    return rotated


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
