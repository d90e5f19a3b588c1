"""Numbers that say something about a network: formulas alone, on plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SMALL = 256  # rows or columns


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
