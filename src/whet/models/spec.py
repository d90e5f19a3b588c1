"""ModelSpec: one frozen description of a decoder, from which the model is built and its config written."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from whet.errors import ModelError

NORMS = ("rms", "layer", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
POSITIONS = ("none", "learned", "sinusoidal", "alibi")
PLACEMENTS = ("pre", "post", "sandwich")
QK_NORMS = ("none", "head", "all")
SCORINGS = ("softmax", "sigmoid")


def _known(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ModelError(f"unknown {what} {value!r}", hint=f"known: {', '.join(known)}")


def _positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ModelError(f"{name}={size}: it must be positive")


@dataclass(frozen=True)
class LinearRopeScaling:
    """Every frequency divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's stretching of rotary frequencies: long wavelengths are slowed down, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071): a ramp between kept and divided frequencies, and a factor on the attention."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        factor = 1.0 if self.scaling is None else self.scaling.factor
        _positive(rope_theta=self.theta, rope_scaling_factor=factor)


@dataclass(frozen=True)
class NormSpec:
    """A normalisation: rms (with weights stored as they are, or less one: `offset`), layer, or none."""

    kind: str = "rms"
    eps: float = 1e-6
    offset: bool = False

    def __post_init__(self) -> None:
        _known("norm", self.kind, NORMS)
        if not 0 <= self.eps < math.inf:
            raise ModelError(f"the epsilon of a norm is {self.eps}: it must be a number from 0")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention: `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    bias: bool = False  # on queries, keys and values
    out_bias: bool = False
    window: int | None = None  # how many positions back, itself included, a position sees
    scale: float | None = None  # of the scores; head_dim ** -0.5 when empty
    softcap: float | None = None  # scores become c * tanh(scores / c)
    qk_norm: str = "none"  # head: each head on its own; all: the whole projection
    fused: bool = False  # one projection for queries, keys and values

    def __post_init__(self) -> None:
        window = 1 if self.window is None else self.window
        _positive(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=window)
        _known("qk_norm", self.qk_norm, QK_NORMS)
        if self.heads % self.kv_heads:
            raise ModelError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rope is not None and self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs of channels")

    @property
    def rotated(self) -> int:
        """Channels of a head that carry the rotary position."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are read out of one small latent.

    A head's query and key are `plain_dim` channels from the latent and `rope_dim` that carry the position;
    the rotated key is shared by all heads. The cache holds kv_rank + rope_dim numbers a token.
    """

    heads: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # queries through a latent of their own
    rope: RopeSpec = RopeSpec()
    window: int | None = None

    def __post_init__(self) -> None:
        _positive(
            heads=self.heads,
            kv_rank=self.kv_rank,
            plain_dim=self.plain_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            q_rank=1 if self.q_rank is None else self.q_rank,
            window=1 if self.window is None else self.window,
        )
        if self.rope_dim % 2:
            raise ModelError(f"rope_dim={self.rope_dim} is odd: rotary positions turn pairs of channels")

    @property
    def rotated(self) -> int:
        """Channels of a head that carry the rotary position."""
        return self.rope_dim


@dataclass(frozen=True)
class FeedForwardSpec:
    """down(activation(up(x))), or with a gate: down(activation(gate(x)) * up(x))."""

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    fused: bool = False  # one projection for gate and up

    def __post_init__(self) -> None:
        _positive(width=self.width)
        _known("activation", self.activation, ACTIVATIONS)


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts: each token goes to the `top_k` gated feed-forward layers that its router prefers.

    Its output is the sum of theirs, each times its score (renormalised: its share of the chosen ones'
    scores), plus that of `shared` experts, which every token goes to. With `balance_bias` a bias is added to
    the scores for the choice, and only for it: no gradient reaches it (arXiv 2408.15664).
    """

    experts: int
    top_k: int
    width: int  # of one expert
    activation: str = "silu"
    scoring: str = "softmax"  # over all experts; sigmoid: each on its own, as DeepSeek-V3's
    renormalise: bool = True
    scale: float = 1.0  # of the routed output
    shared: int = 0  # experts of the same width, computed as one
    balance_bias: bool = False

    def __post_init__(self) -> None:
        _positive(experts=self.experts, top_k=self.top_k, width=self.width, scale=self.scale)
        _known("activation", self.activation, ACTIVATIONS)
        _known("scoring of experts", self.scoring, SCORINGS)
        if self.top_k > self.experts:
            raise ModelError(f"top_k={self.top_k} is more than there are experts ({self.experts})")
        if self.shared < 0:
            raise ModelError(f"shared={self.shared}: it must not be negative")


@dataclass(frozen=True)
class BlockSpec:
    """One layer: norms before attention and feed-forward (pre), after them (post), or both (sandwich).

    A part that is None is not there, and neither are its norms: the stream passes it unchanged.
    """

    attention: AttentionSpec | LatentAttentionSpec | None
    feedforward: FeedForwardSpec | ExpertsSpec | None
    placement: str = "pre"

    def __post_init__(self) -> None:
        _known("norm placement", self.placement, PLACEMENTS)

    @property
    def grouped(self) -> AttentionSpec:
        """Its attention, where it must be the grouped kind."""
        if not isinstance(self.attention, AttentionSpec):
            raise ModelError("this family has grouped attention in every layer")
        return self.attention

    @property
    def dense(self) -> FeedForwardSpec:
        """Its feed-forward layer, where there must be one."""
        if not isinstance(self.feedforward, FeedForwardSpec):
            raise ModelError("this family has a feed-forward layer in every layer")
        return self.feedforward

    @property
    def routed(self) -> ExpertsSpec:
        """Its experts, where there must be some."""
        if not isinstance(self.feedforward, ExpertsSpec):
            raise ModelError("this family has experts in every layer")
        return self.feedforward


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides what a decoder computes, apart from its weights."""

    family: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    tied_head: bool
    max_positions: int
    positions: str = "none"  # besides the rope of each layer
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        _positive(vocab_size=self.vocab_size, d_model=self.d_model, max_positions=self.max_positions)
        _positive(logit_scale=self.logit_scale)
        _known("positions", self.positions, POSITIONS)
        if not self.blocks:
            raise ModelError("a model needs at least one layer")
        if len({(each.experts, each.top_k) for each in self.mixtures}) > 1:
            raise ModelError("every layer with experts must have as many of them, and choose as many")

    @property
    def attentions(self) -> list[AttentionSpec | LatentAttentionSpec]:
        """The attention of each layer that has some."""
        return [block.attention for block in self.blocks if block.attention is not None]

    @property
    def mixtures(self) -> list[ExpertsSpec]:
        """The experts of each layer that has some."""
        return [block.feedforward for block in self.blocks if isinstance(block.feedforward, ExpertsSpec)]

    def describe(self) -> dict[str, object]:
        """A plain JSON value, equal for equal architectures."""
        found = dataclasses.asdict(self)
        if self.logit_scale == 1.0:  # as it was before this could be said: fingerprints stay what they are
            del found["logit_scale"]
        return found

    def fingerprint(self) -> str:
        """SHA-256 of the canonical description: stable across machines and key order."""
        canonical = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
