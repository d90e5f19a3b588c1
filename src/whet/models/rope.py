"""Position encodings: RoPE with its scalings, sinusoidal embeddings and ALiBi."""

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
    """Return the angle per position of each channel pair [head_dim / 2], in float32."""
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
    """Divide low frequencies by `factor`, keep high ones, and interpolate linearly in between."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_positions / wavelengths  # rotations within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(
    frequencies: torch.Tensor, scaling: YarnRopeScaling, *, theta: float, head_dim: int
) -> torch.Tensor:
    """Keep channels that rotate often within the original context, divide the rest, with a linear ramp."""

    def channel(rotations: float) -> float:
        """Return the (fractional) channel pair with this many rotations within the original context."""
        return (
            head_dim
            * math.log(scaling.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / (max(high - low, 0.001))
    weight = ramp.clamp(0, 1)
    return frequencies / scaling.factor * weight + frequencies * (1 - weight)


def rope_tables(
    attentions: Iterable[AttentionSpec | LatentAttentionSpec],
    positions: torch.Tensor,
    *,
    dtype: torch.dtype,
    cache: Frequencies,
) -> dict[tuple[RopeSpec | None, int], Rotation]:
    """Return the cosine and sine for each kind of RoPE. Missing frequencies are added to `cache`.

    Frequencies are not buffers, because they are derived, stay in float32 and are in no checkpoint.
    """
    tables: dict[tuple[RopeSpec | None, int], Rotation] = {}
    for attention in attentions:
        rope, size = attention.rope, attention.rotary_dim
        if rope is None or (rope, size) in tables:
            continue
        key = (positions.device, rope, size)
        if key not in cache:
            cache[key] = inverse_frequencies(rope, size).to(positions.device)
        cos, sin = rope_cos_sin(positions, cache[key])
        if isinstance(rope.scaling, YarnRopeScaling):
            cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
        tables[rope, size] = (cos.to(dtype), sin.to(dtype))
    return tables


def rope_cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
    """Return the cosine and sine [B, 1, T, head_dim] of each position's angles, in float32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paths: Paths = FAST) -> torch.Tensor:
    """Rotate channel i of x with channel i + head_dim/2, the layout of Hugging Face checkpoints."""
    if paths.explicit_backward and cpu_autograd.is_supported(x, cos, sin):
        return cpu_autograd.rotate(x, cos, sin)
    if paths.decoding and fused_decode.is_supported(x, cos, sin):
        return fused_decode.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sinusoidal embeddings [B, T, size] of 'Attention is all you need', interleaved."""
    frequencies = torch.exp(
        torch.arange(0, size, 2, device=positions.device).float() * (-math.log(10_000.0) / size)
    )
    angles = positions[..., None].float() * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :size]


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return the ALiBi slopes [heads] (arXiv 2108.12409): geometric, interleaved past a power of two."""

    def series(count: int) -> list[float]:
        return [2 ** (-8 * (index + 1) / count) for index in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    return torch.tensor(series(power) + series(2 * power)[0::2][: heads - power])


def alibi_slopes_by_heads(
    spec: ModelSpec, x: torch.Tensor, *, cache: dict[tuple[torch.device, torch.dtype, int], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the ALiBi slopes by number of heads, in the device and dtype of x; empty without ALiBi.

    Slopes are stored in `cache`, because a CUDA graph cannot copy them from the host.
    """
    if spec.positions != "alibi":
        return {}
    counts = {attention.heads for attention in spec.attention_specs}
    for heads in counts:
        if (x.device, x.dtype, heads) not in cache:
            cache[x.device, x.dtype, heads] = alibi_slopes(heads).to(x.device, x.dtype)
    return {heads: cache[x.device, x.dtype, heads] for heads in counts}
