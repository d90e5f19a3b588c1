"""Rotary position embeddings, and the other ways to tell a model where a token stands."""

import math
from collections.abc import Iterable

import torch

from whet.models.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    RopeSpec,
    YarnRopeScaling,
)
from whet.ops.dispatch import FAST, Paths
from whet.ops.kernels import cpu_autograd, fused_decode

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosine and sine
Frequencies = dict[tuple[torch.device, RopeSpec, int], torch.Tensor]


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


def rotations(
    attentions: Iterable[AttentionSpec | LatentAttentionSpec],
    positions: torch.Tensor,
    *,
    dtype: torch.dtype,
    known: Frequencies,
) -> dict[tuple[RopeSpec | None, int], Rotation]:
    """One for each kind of rope; new frequencies are added to `known`.

    They are no buffers: frequencies are derived, float32, and in no checkpoint.
    """
    found: dict[tuple[RopeSpec | None, int], Rotation] = {}
    for attention in attentions:
        rope, size = attention.rope, attention.rotated
        if rope is None or (rope, size) in found:
            continue
        key = (positions.device, rope, size)
        if key not in known:
            known[key] = inverse_frequencies(rope, size).to(positions.device)
        cos, sin = rotation(positions, known[key])
        if isinstance(rope.scaling, YarnRopeScaling):
            cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
        found[rope, size] = (cos.to(dtype), sin.to(dtype))
    return found


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
    """Cosine and sine [B, 1, T, head_dim] of every position's angles, in float32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paths: Paths = FAST) -> torch.Tensor:
    """Turn channel i with channel i + head_dim/2 (the layout of Hugging Face checkpoints)."""
    if paths.explicit_backward and cpu_autograd.suits(x, cos, sin):
        return cpu_autograd.rotate(x, cos, sin)
    if paths.decoding and fused_decode.suits(x, cos, sin):
        return fused_decode.rotate(x, cos, sin)
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


def slopes_of(
    spec: ModelSpec, x: torch.Tensor, *, known: dict[tuple[torch.device, torch.dtype, int], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """ALiBi's slopes for each number of heads, where a model has them, for hidden states x.

    They are `known` from the first time on: a CUDA graph cannot copy them from the host.
    """
    if spec.positions != "alibi":
        return {}
    counts = {attention.heads for attention in spec.attentions}
    for heads in counts:
        if (x.device, x.dtype, heads) not in known:
            known[x.device, x.dtype, heads] = alibi_slopes(heads).to(x.device, x.dtype)
    return {heads: known[x.device, x.dtype, heads] for heads in counts}
