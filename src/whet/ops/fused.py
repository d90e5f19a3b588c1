"""Norm, rotation and gate as one kernel each, on a GPU and without gradients: for the steps of decoding.

There a kernel takes about as long as its start, and the plain forms are eight, five and two of them. Numbers
are rounded where the plain forms round them. Compiled code needs none of this.
"""

import torch

_KINDS = (torch.Tensor, torch.nn.Parameter)  # no shards, and nothing that only looks like a tensor
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def suits(*tensors: torch.Tensor) -> bool:
    """Whether these tensors are for the functions of this file."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return all(type(each) in _KINDS and each.is_cuda and each.dtype in _DTYPES for each in tensors)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; with `offset` times 1 + weight, before it is rounded."""
    from whet.ops.fused_triton import rms_norm_on_gpu

    return rms_norm_on_gpu(x, weight, eps, offset=offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i of [B, heads, T, D] with channel i + D/2, by cosines and sines [B or 1, 1, T, D]."""
    from whet.ops.fused_triton import rotate_on_gpu

    return rotate_on_gpu(x, cos, sin)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    from whet.ops.fused_triton import silu_gate_on_gpu

    return silu_gate_on_gpu(gate, up)
