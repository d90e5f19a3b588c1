"""Rotary position embeddings."""

import math

import torch

from whet.models.spec import Llama3RopeScaling, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle a position, for each pair of channels [head_dim / 2], in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend linearly between the two bounds."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths  # turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [B, 1, T, head_dim] of every position's angles, in float32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i with channel i + head_dim/2 (the layout of Hugging Face checkpoints)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
