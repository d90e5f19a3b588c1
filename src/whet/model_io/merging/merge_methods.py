"""Ways to make one weight out of several, as formulas on single tensors.

Everything is computed in float32. Models come as iterables and are taken one at a time, so that the memory
does not grow with their number: `map` and `del` below, where a generator or zip would hold on to a tensor
while the next one is made.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

_PARALLEL = 0.9995  # cosine above which the arc between two tensors is a line


def average(models: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum_i w_i A_i (model soups, arXiv 2203.05482)."""
    return _weighted_sum(map(torch.Tensor.float, models), weights)


def slerp(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """The point at `share` of the way from the first to the second, along the arc between their directions.

    Spherical linear interpolation (Shoemake 1985) of the whole tensor as one vector; a straight line where
    the two are nearly parallel or opposite, or one of them is zero: the arc is not defined there.
    """
    a, b = first.float(), second.float()
    lengths = a.norm() * b.norm()
    cosine = float(torch.dot(a.flatten(), b.flatten()) / lengths) if lengths > 0 else 1.0
    if abs(cosine) > _PARALLEL:
        return torch.lerp(a, b, share)
    angle = math.acos(cosine)
    parts = [math.sin((1 - share) * angle), math.sin(share * angle)]
    return (a * (parts[0] / math.sin(angle))).add_(b, alpha=parts[1] / math.sin(angle))


def task_arithmetic(
    base: torch.Tensor, models: Iterable[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """base + sum_i w_i (A_i - base) (arXiv 2212.04089)."""
    return _weighted_sum(_deltas(base, models), weights).add_(base)


def ties(
    base: torch.Tensor, models: Iterable[torch.Tensor], weights: Sequence[float], *, density: float
) -> torch.Tensor:
    """Trim, elect sign, disjoint mean (TIES, arXiv 2306.01708), with the trimming tensor by tensor.

    The sign of each entry is that of the sum of the trimmed updates: the side of the larger total magnitude.
    """
    trimmed = map(partial(trim, density=density), _deltas(base, models))
    return _elected_mean(trimmed, weights).add_(base)


def dare(
    base: torch.Tensor,
    models: Iterable[torch.Tensor],
    weights: Sequence[float],
    *,
    density: float,
    generators: Iterable[torch.Generator],
) -> torch.Tensor:
    """Task arithmetic on updates of which a random part was dropped (DARE, arXiv 2311.03099)."""
    return _weighted_sum(_dropped(base, models, density, generators), weights).add_(base)


def dare_ties(
    base: torch.Tensor,
    models: Iterable[torch.Tensor],
    weights: Sequence[float],
    *,
    density: float,
    generators: Iterable[torch.Generator],
) -> torch.Tensor:
    """TIES with DARE's random dropping in the place of the trimming (arXiv 2311.03099, section 4)."""
    return _elected_mean(_dropped(base, models, density, generators), weights).add_(base)


def trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    """Keep the share `density` of the entries with the largest magnitudes (and any equal to the last)."""
    magnitudes = delta.abs().flatten().numpy()
    dropped = magnitudes.size - max(1, round(density * magnitudes.size))
    magnitudes.partition(dropped)  # in place: torch.kthvalue would need three times the memory
    least = float(magnitudes[dropped])
    del magnitudes
    return torch.where(delta.abs() >= least, delta, 0.0)


def drop(delta: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """Keep each entry with probability `density` and divide by it, so that the mean stays."""
    kept = torch.rand(delta.shape, generator=generator) < density
    return torch.where(kept, delta / density, 0.0)


def tensor_generator(seed: int, model: int, name: str) -> torch.Generator:
    """Random numbers for one tensor of one model: the same whatever the order in which tensors come."""
    digest = hashlib.sha256(f"{seed}/{model}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _deltas(base: torch.Tensor, models: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return map(partial(_difference, base), models)


def _difference(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    return model.float() - base


def _dropped(
    base: torch.Tensor,
    models: Iterable[torch.Tensor],
    density: float,
    generators: Iterable[torch.Generator],
) -> Iterator[torch.Tensor]:
    return map(lambda delta, generator: drop(delta, density, generator), _deltas(base, models), generators)


def _weighted_sum(tensors: Iterator[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = next(tensors) * weights[0]
    for weight in weights[1:]:
        total.add_(next(tensors), alpha=weight)
    return total


def _elected_mean(deltas: Iterator[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean of the updates that have the elected sign; both signs are summed in one pass."""
    delta = next(deltas)
    up, down, up_weight, down_weight = (torch.zeros_like(delta) for _ in range(4))
    for index, weight in enumerate(weights):
        if index:
            delta = next(deltas)
        up.add_(delta.clamp(min=0), alpha=weight)
        down.add_(delta.clamp(max=0), alpha=weight)
        up_weight.add_(delta > 0, alpha=weight)
        down_weight.add_(delta < 0, alpha=weight)
        del delta
    elected = up + down
    some = torch.finfo(torch.float32).tiny  # nothing on a side: 0 / some = 0
    up.div_(up_weight.clamp_(min=some))
    down.div_(down_weight.clamp_(min=some))
    del up_weight, down_weight
    return torch.where(elected > 0, up, down).masked_fill_(elected == 0, 0.0)
