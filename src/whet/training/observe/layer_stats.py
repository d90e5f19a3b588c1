"""Statistics by layer: norms, attention entropy, effective rank, gradient noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from whet.models.language_model import LanguageModel

T = TypeVar("T")
_SMALL = 256  # rows or columns


class Layers:
    """Which layer each parameter belongs to. A model without blocks counts the modules it is made of."""

    def __init__(self, model: nn.Module) -> None:
        blocks = list(model.blocks()) if isinstance(model, LanguageModel) else _parts(model)
        self._count = len(blocks)
        self._layer_of = {id(p): layer for layer, block in enumerate(blocks) for p in block.parameters()}

    def __len__(self) -> int:
        return self._count

    def root_sums(
        self, parameters: Sequence[torch.Tensor], norms: Sequence[float | None]
    ) -> tuple[list[float | None], float]:
        """The norm of each layer from those of its parameters (None: it has none), and that of the rest."""
        gathered = self.gathered(parameters, [[] if norm is None else [norm] for norm in norms])
        rest = [n for p, n in zip(parameters, norms, strict=True) if id(p) not in self._layer_of and n]
        return [_root_sum(found) if found else None for found in gathered], _root_sum(rest)

    def gathered(self, parameters: Sequence[torch.Tensor], items: Sequence[Sequence[T]]) -> list[list[T]]:
        """What the parameters of each layer bring; what is outside the layers is left out."""
        found: list[list[T]] = [[] for _ in range(self._count)]
        for parameter, each in zip(parameters, items, strict=True):
            if (layer := self._layer_of.get(id(parameter))) is not None:
                found[layer] += each
        return found


def _parts(model: nn.Module) -> list[nn.Module]:
    """Children, and the members of those that are lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    return [part for part in found if any(True for _ in part.parameters())]


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Their standard deviation, as of a whole population."""
    middle = mean(values)
    return float(mean([(value - middle) ** 2 for value in values]) ** 0.5)


def _root_sum(norms: Sequence[float]) -> float:
    return float(sum(norm**2 for norm in norms) ** 0.5)


def attention_entropy(weights: torch.Tensor) -> torch.Tensor:
    """Shannon's entropy, in nats, of distributions over the last dimension."""
    return torch.special.entr(weights.float()).sum(-1)


def effective_rank(matrices: torch.Tensor) -> torch.Tensor:
    """exp(entropy of the normalised singular values) of matrices [..., rows, columns]; NaN of zeros.

    Roy and Vetterli, 2007. The singular values are the roots of the eigenvalues of the smaller Gram matrix,
    in float64: several times as fast, and what is lost (values under 1e-8 of the largest) weighs nothing.
    """
    # a GPU is slower at small ones, and Apple's has no float64
    on_host = matrices.device.type == "mps" or min(matrices.shape[-2:]) <= _SMALL
    wide = matrices.detach().to("cpu" if on_host else matrices.device, torch.float64)
    flat = wide if wide.shape[-2] <= wide.shape[-1] else wide.mT
    values = torch.linalg.eigvalsh(flat @ flat.mT).clamp(min=0).sqrt()
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


@dataclass(frozen=True)
class GradientNoiseScale:
    """What batches of several sizes tell about the gradient."""

    signal: float  # squared norm of the true gradient
    noise: float  # trace of the covariance of one unit's gradient

    @property
    def scale(self) -> float | None:
        """Units in a batch whose noise is as large as the gradient; None where noise is all that is seen."""
        return self.noise / self.signal if self.signal > 0 else None


def gradient_noise(
    sizes: Sequence[float], squared_norms: Sequence[float], squared_norm_of_all: float
) -> GradientNoiseScale:
    """Unbiased estimates from the mean gradients of parts and that of all together (arXiv 1812.06162, A.1).

    In expectation, a part of b units has a squared norm of signal + noise / b, and all B signal + noise / B.
    """
    total = sum(sizes)
    small = sum(size / total * norm for size, norm in zip(sizes, squared_norms, strict=True))
    noise = (small - squared_norm_of_all) * total / (len(sizes) - 1)
    return GradientNoiseScale(squared_norm_of_all - noise / total, noise)
