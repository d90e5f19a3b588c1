"""The gradient norm over all parameters and ranks, and clipping by it."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from whet.parallel.gradient_sync import by_mesh


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, in float32 or wider; some of them may be in shards."""
    norms = [torch.linalg.vector_norm(torch.stack(_norms(kind))) for kind in by_mesh(gradients)]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def _norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each gradient; not in bf16, which would round the sum of them all to three digits."""
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    norms: list[torch.Tensor] = []
    for dtype, found in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        if wide == dtype:
            norms += torch._foreach_norm(found, 2.0)
        elif isinstance(
            found[0], DTensor
        ):  # for many of them at once torch 2.15 takes a dtype for a dimension
            norms += [torch.linalg.vector_norm(each, dtype=wide) for each in found]
        else:
            norms += torch._foreach_norm(found, 2.0, dtype=wide)
    return norms


def rescale(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all gradients."""
    for kind in by_mesh(gradients) if factor != 1.0 else ():
        torch._foreach_mul_(kind, factor)


def excess(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients of this norm are divided by, so that it is at most a limit."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Divide gradients, whose norm is known, so that it is at most a limit."""
    factor = 1.0 / excess(norm, limit)
    for kind in by_mesh(gradients):
        torch._foreach_mul_(kind, factor)
