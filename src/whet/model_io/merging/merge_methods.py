"""Methods that merge several weights into one, as formulas on single tensors.

Everything is computed in float32. Models are iterables that are consumed one at a time, so the memory does
not grow with their number. The code uses `map` and `del`, because a generator or zip would keep a reference
to one tensor while the next is computed.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

_PARALLEL = 0.9995  # cosine above which linear interpolation is used


def average(models: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return sum_i w_i A_i (model soups, arXiv 2203.05482).

    Args:
        models: The tensors A_i of the models.
        weights: The weights w_i.
    """
    return _weighted_sum(map(torch.Tensor.float, models), weights)


def slerp(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Interpolate spherically between two tensors, each treated as one vector (Shoemake 1985).

    Interpolation is linear if the tensors are nearly parallel or opposite, or if one of them is zero, because
    the arc is not defined then.

    Args:
        first: The result for a share of 0.
        second: The result for a share of 1.
        share: The position between the two, from 0 to 1.
    """
    a, b = first.float(), second.float()
    norms = a.norm() * b.norm()
    cosine = float(torch.dot(a.flatten(), b.flatten()) / norms) if norms > 0 else 1.0
    if abs(cosine) > _PARALLEL:
        return torch.lerp(a, b, share)
    angle = math.acos(cosine)
    sines = [math.sin((1 - share) * angle), math.sin(share * angle)]
    return (a * (sines[0] / math.sin(angle))).add_(b, alpha=sines[1] / math.sin(angle))


def task_arithmetic(
    base: torch.Tensor, models: Iterable[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Return base + sum_i w_i (A_i - base) (task arithmetic, arXiv 2212.04089).

    Args:
        base: The tensor of the base model.
        models: The tensors A_i of the models.
        weights: The weights w_i.
    """
    return _weighted_sum(_deltas(base, models), weights).add_(base)


def ties(
    base: torch.Tensor, models: Iterable[torch.Tensor], weights: Sequence[float], *, density: float
) -> torch.Tensor:
    """Merge with TIES (arXiv 2306.01708): trim, elect a sign, take the disjoint mean. Trims each tensor.

    The elected sign of an entry is that of the sum of the trimmed updates, the side with the larger total
    magnitude.

    Args:
        base: The tensor of the base model.
        models: The tensors of the models.
        weights: The weights of the models.
        density: The fraction of each update that is kept.
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
    """Merge with DARE (arXiv 2311.03099): task arithmetic on updates with randomly dropped entries.

    Args:
        base: The tensor of the base model.
        models: The tensors of the models.
        weights: The weights of the models.
        density: The probability that an entry of an update is kept.
        generators: One random generator per model.
    """
    return _weighted_sum(_dropped_deltas(base, models, density, generators), weights).add_(base)


def dare_ties(
    base: torch.Tensor,
    models: Iterable[torch.Tensor],
    weights: Sequence[float],
    *,
    density: float,
    generators: Iterable[torch.Generator],
) -> torch.Tensor:
    """Merge with TIES, with DARE's random dropping instead of trimming (arXiv 2311.03099, section 4).

    Args:
        base: The tensor of the base model.
        models: The tensors of the models.
        weights: The weights of the models.
        density: The probability that an entry of an update is kept.
        generators: One random generator per model.
    """
    return _elected_mean(_dropped_deltas(base, models, density, generators), weights).add_(base)


def trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    """Keep the fraction `density` of entries with the largest magnitudes, including ties."""
    magnitudes = delta.abs().flatten().numpy()
    num_dropped = magnitudes.size - max(1, round(density * magnitudes.size))
    magnitudes.partition(num_dropped)  # in place: torch.kthvalue would need three times the memory
    threshold = float(magnitudes[num_dropped])
    del magnitudes
    return torch.where(delta.abs() >= threshold, delta, 0.0)


def drop(delta: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """Keep each entry with probability `density` and divide it by `density`, which preserves the mean."""
    mask = torch.rand(delta.shape, generator=generator) < density
    return torch.where(mask, delta / density, 0.0)


def tensor_generator(seed: int, model: int, name: str) -> torch.Generator:
    """Return a random generator for one tensor of one model, independent of the order of tensors."""
    digest = hashlib.sha256(f"{seed}/{model}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _deltas(base: torch.Tensor, models: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return map(partial(_difference, base), models)


def _difference(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    return model.float() - base


def _dropped_deltas(
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
    """Return the weighted mean of the updates with the elected sign. Both signs are summed in one pass."""
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
    tiny = torch.finfo(torch.float32).tiny  # avoids 0 / 0 if no update has a sign
    up.div_(up_weight.clamp_(min=tiny))
    down.div_(down_weight.clamp_(min=tiny))
    del up_weight, down_weight
    return torch.where(elected > 0, up, down).masked_fill_(elected == 0, 0.0)
