"""ModelSpec: one frozen description of a decoder, from which the model is built and its config written."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from whet.errors import ModelError


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's stretching of rotary frequencies: long wavelengths are slowed down, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions."""

    theta: float = 10_000.0
    scaling: Llama3RopeScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention: `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1:
            raise ModelError(
                f"attention needs positive sizes: heads={self.heads}, kv_heads={self.kv_heads}, "
                f"head_dim={self.head_dim}"
            )
        if self.heads % self.kv_heads:
            raise ModelError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs of channels")


@dataclass(frozen=True)
class FeedForwardSpec:
    """A gated feed-forward layer: down(activation(gate(x)) * up(x))."""

    width: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """One layer of the decoder."""

    attention: AttentionSpec
    feedforward: FeedForwardSpec


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides what a decoder computes, apart from its weights."""

    family: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockSpec, ...]
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    max_positions: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)}: it must be positive")
        if not self.blocks:
            raise ModelError("a model needs at least one layer")

    def describe(self) -> dict[str, object]:
        """A plain JSON value, equal for equal architectures."""
        return dataclasses.asdict(self)

    def fingerprint(self) -> str:
        """SHA-256 of the canonical description: stable across machines and key order."""
        canonical = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
