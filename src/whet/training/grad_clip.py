"""Gradient norm over all parameters and ranks, and gradient clipping."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from whet.parallel.gradient_sync import group_by_mesh


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global norm of gradients, some of which may be sharded, in float32 or wider."""
    norms = [torch.linalg.vector_norm(torch.stack(_norms(group))) for group in group_by_mesh(gradients)]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return full[0] if len(full) == 1 else torch.linalg.vector_norm(torch.stack(full))


def _norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient; never in bf16, which would round the global norm to three digits."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms: list[torch.Tensor] = []
    for dtype, group in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        if wide == dtype:
            norms += torch._foreach_norm(group, 2.0)
        elif isinstance(group[0], DTensor):
            # torch 2.15's _foreach_norm of DTensors mistakes the dtype for a dimension
            norms += [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in group]
        else:
            norms += torch._foreach_norm(group, 2.0, dtype=wide)
    return norms


def rescale(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all gradients by a factor, in place."""
    for group in group_by_mesh(gradients) if factor != 1.0 else ():
        torch._foreach_mul_(group, factor)


def clip_divisor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the divisor that reduces a gradient norm to at most `limit`; at least 1."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients with the given norm in place, so that their norm is at most `limit`."""
    factor = 1.0 / clip_divisor(norm, limit)
    for group in group_by_mesh(gradients):
        torch._foreach_mul_(group, factor)
