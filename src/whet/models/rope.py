"""Rotary position embeddings, and the other ways to tell a model where a token stands."""

import math

import torch

from whet.models.spec import LinearRopeScaling, Llama3RopeScaling, RopeSpec, YarnRopeScaling


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle a position, for each pair of channels [head_dim / 2], in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(frequencies, scaling, theta=rope.theta, head_dim=head_dim)


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend linearly between the two bounds."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths  # turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(
    frequencies: torch.Tensor, scaling: YarnRopeScaling, *, theta: float, head_dim: int
) -> torch.Tensor:
    """Keep channels that turn often within the original context, divide those that do not, ramp between."""

    def channel(turns: float) -> float:
        """The channel pair that makes so many turns within the original context."""
        return (
            head_dim
            * math.log(scaling.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / (max(high - low, 0.001))
    divide = ramp.clamp(0, 1)
    return frequencies / scaling.factor * divide + frequencies * (1 - divide)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [B, 1, T, head_dim] of every position's angles, in float32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i with channel i + head_dim/2 (the layout of Hugging Face checkpoints)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    """The fixed sines and cosines [B, T, size] of 'Attention is all you need', interleaved."""
    rates = torch.exp(
        torch.arange(0, size, 2, device=positions.device).float() * (-math.log(10_000.0) / size)
    )
    angles = positions[..., None].float() * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :size]


def alibi_slopes(heads: int) -> torch.Tensor:
    """ALiBi's slope for each head (arXiv 2108.12409): a geometric series, interleaved past a power of two."""

    def series(count: int) -> list[float]:
        return [2 ** (-8 * (index + 1) / count) for index in range(count)]

    whole = 2 ** math.floor(math.log2(heads))
    return torch.tensor(series(whole) + series(2 * whole)[0::2][: heads - whole])
