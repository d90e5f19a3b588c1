"""RMSNorm, RoPE and SwiGLU gate as one kernel each, for decoding on a GPU.

While decoding, a kernel takes about as long as its launch, and the plain implementations launch eight, five
and two kernels. Values are rounded at the same points as in the plain implementations, but sums run in
another order, so the last digit may differ. Other passes without gradients, such as those of a reference
model, therefore keep the plain implementations, which match training bit for bit.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from whet.ops.dispatch import can_build_kernels

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # no DTensors or other tensor subclasses
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_is_decoding: ContextVar[bool] = ContextVar("decoding", default=False)


@contextlib.contextmanager
def fused_decoding() -> Iterator[None]:
    """Allow the fused kernels of this module in the `with` block."""
    token = _is_decoding.set(True)
    try:
        yield
    finally:
        _is_decoding.reset(token)


def is_supported(*tensors: torch.Tensor) -> bool:
    """Whether the kernels of this module may be used for these tensors."""
    if torch.compiler.is_compiling() or not _is_decoding.get() or torch.is_grad_enabled():
        return False
    supported = all(
        type(tensor) in _TENSOR_TYPES and tensor.is_cuda and tensor.dtype in _DTYPES for tensor in tensors
    )
    return supported and can_build_kernels()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension.

    With `offset`, the factor is 1 + weight, applied before rounding.
    """
    from whet.ops.kernels.fused_decode_triton import rms_norm_on_gpu

    return rms_norm_on_gpu(x, weight, eps, offset=offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i of x [B, heads, T, D] with channel i + D/2. cos and sin are [B or 1, 1, T, D]."""
    from whet.ops.kernels.fused_decode_triton import rotate_on_gpu

    return rotate_on_gpu(x, cos, sin)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    from whet.ops.kernels.fused_decode_triton import silu_gate_on_gpu

    return silu_gate_on_gpu(gate, up)
