"""Norm, rotation and gate as one kernel each, for decoding on a GPU.

A kernel takes about as long as its start there, and the plain forms are eight, five and two of them. Numbers
are rounded where the plain forms round them, but sums have another order: a last digit may differ. So other
passes without gradients (a reference's, say) keep the plain forms, whose bits are those of training.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from whet.ops.dispatch import kernels_work

_KINDS = (torch.Tensor, torch.nn.Parameter)  # no shards, and nothing that only looks like a tensor
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_decodes: ContextVar[bool] = ContextVar("decoding", default=False)


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """The functions of this file may be used, for the time of a `with` block."""
    token = _decodes.set(True)
    try:
        yield
    finally:
        _decodes.reset(token)


def suits(*tensors: torch.Tensor) -> bool:
    """Whether these tensors are for the functions of this file."""
    if torch.compiler.is_compiling() or not _decodes.get() or torch.is_grad_enabled():
        return False
    fit = all(type(each) in _KINDS and each.is_cuda and each.dtype in _DTYPES for each in tensors)
    return fit and kernels_work()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; with `offset` times 1 + weight, before it is rounded."""
    from whet.ops.kernels.fused_decode_triton import rms_norm_on_gpu

    return rms_norm_on_gpu(x, weight, eps, offset=offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i of [B, heads, T, D] with channel i + D/2, by cosines and sines [B or 1, 1, T, D]."""
    from whet.ops.kernels.fused_decode_triton import rotate_on_gpu

    return rotate_on_gpu(x, cos, sin)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    from whet.ops.kernels.fused_decode_triton import silu_gate_on_gpu

    return silu_gate_on_gpu(gate, up)
