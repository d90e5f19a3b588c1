"""Statistics of layers: norms, attention entropy, effective rank and gradient noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from whet.models.language_model import LanguageModel

T = TypeVar("T")
_MAX_HOST_SIDE = 256  # matrices with at most this many rows or columns are decomposed on the CPU


class Layers:
    """Maps parameters to layers: the blocks of a language model, or the child modules of another model."""

    def __init__(self, model: nn.Module) -> None:
        blocks = list(model.blocks()) if isinstance(model, LanguageModel) else _child_modules(model)
        self._count = len(blocks)
        self._layer_of = {id(p): layer for layer, block in enumerate(blocks) for p in block.parameters()}

    def __len__(self) -> int:
        return self._count

    def root_sums(
        self, parameters: Sequence[torch.Tensor], norms: Sequence[float | None]
    ) -> tuple[list[float | None], float]:
        """Return the norm of each layer from the norms of its parameters, and that of all other parameters.

        A layer without norms has None.
        """
        by_layer = self.collect(parameters, [[] if norm is None else [norm] for norm in norms])
        rest = [n for p, n in zip(parameters, norms, strict=True) if id(p) not in self._layer_of and n]
        return [_root_sum(values) if values else None for values in by_layer], _root_sum(rest)

    def collect(self, parameters: Sequence[torch.Tensor], items: Sequence[Sequence[T]]) -> list[list[T]]:
        """Return the items of all parameters of each layer; parameters outside the layers are left out."""
        by_layer: list[list[T]] = [[] for _ in range(self._count)]
        for parameter, values in zip(parameters, items, strict=True):
            if (layer := self._layer_of.get(id(parameter))) is not None:
                by_layer[layer] += values
        return by_layer


def _child_modules(model: nn.Module) -> list[nn.Module]:
    """Return the child modules with parameters; a ModuleList is replaced by its members."""
    modules: list[nn.Module] = []
    for child in model.children():
        modules += list(child) if isinstance(child, nn.ModuleList) else [child]
    return [module for module in modules if any(True for _ in module.parameters())]


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation of at least one value."""
    average = mean(values)
    return float(mean([(value - average) ** 2 for value in values]) ** 0.5)


def _root_sum(norms: Sequence[float]) -> float:
    return float(sum(norm**2 for norm in norms) ** 0.5)


def attention_entropy(weights: torch.Tensor) -> torch.Tensor:
    """Return the Shannon entropy in nats of distributions over the last dimension."""
    return torch.special.entr(weights.float()).sum(-1)


def effective_rank(matrices: torch.Tensor) -> torch.Tensor:
    """Return exp(entropy of the normalized singular values) of matrices [..., rows, columns].

    Defined by Roy and Vetterli, 2007; NaN for zero matrices. The singular values are computed as square roots
    of the eigenvalues of the smaller Gram matrix in float64. That is several times faster, and values below
    1e-8 of the largest, which it loses, do not matter.
    """
    # small matrices are faster on the CPU, and MPS has no float64
    on_host = matrices.device.type == "mps" or min(matrices.shape[-2:]) <= _MAX_HOST_SIDE
    wide = matrices.detach().to("cpu" if on_host else matrices.device, torch.float64)
    flat = wide if wide.shape[-2] <= wide.shape[-1] else wide.mT
    values = torch.linalg.eigvalsh(flat @ flat.mT).clamp(min=0).sqrt()
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


@dataclass(frozen=True)
class GradientNoiseScale:
    """Estimates of the gradient and its noise."""

    signal: float  # squared norm of the true gradient
    noise: float  # trace of the covariance of the gradient of one unit (token, pair or text)

    @property
    def scale(self) -> float | None:
        """Batch size in units at which noise equals signal; None if the estimated signal is not positive."""
        return self.noise / self.signal if self.signal > 0 else None


def gradient_noise(
    sizes: Sequence[float], squared_norms: Sequence[float], squared_norm_of_all: float
) -> GradientNoiseScale:
    """Return unbiased estimates from the gradients of small batches and their union (arXiv 1812.06162, A.1).

    The expected squared norm is signal + noise / b for a batch of b units.

    Args:
        sizes: The number of units in each small batch.
        squared_norms: The squared norm of the mean gradient of each small batch.
        squared_norm_of_all: The squared norm of the mean gradient of all batches together.
    """
    total = sum(sizes)
    small = sum(size / total * norm for size, norm in zip(sizes, squared_norms, strict=True))
    noise = (small - squared_norm_of_all) * total / (len(sizes) - 1)
    return GradientNoiseScale(squared_norm_of_all - noise / total, noise)
