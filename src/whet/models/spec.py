"""ModelSpec: the immutable description of a decoder, used to build the model and to write its config."""

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


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ModelError(f"unknown {name} {value!r}", hint=f"known: {', '.join(choices)}")


def _check_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ModelError(f"{name}={size} must be positive and finite")


@dataclass(frozen=True)
class LinearRopeScaling:
    """Linear RoPE scaling: every frequency is divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's RoPE scaling: low frequencies are divided by a factor, high frequencies are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071): a ramp from kept to divided frequencies, and a factor on attention scores."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embeddings: the base frequency and an optional scaling."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        factor = 1.0 if self.scaling is None else self.scaling.factor
        _check_positive(rope_theta=self.theta, rope_scaling_factor=factor)


@dataclass(frozen=True)
class NormSpec:
    """A normalization: rms, layer or none. With `offset`, the factor of rms is 1 + weight."""

    kind: str = "rms"
    eps: float = 1e-6
    offset: bool = False

    def __post_init__(self) -> None:
        _check_choice("norm", self.kind, NORMS)
        if not 0 <= self.eps < math.inf:
            raise ModelError(f"norm eps={self.eps} must be a finite number of at least 0")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention: `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    bias: bool = False  # on queries, keys and values
    out_bias: bool = False
    window: int | None = None  # sliding window: how many positions a query sees, itself included
    scale: float | None = None  # factor on the scores; None means head_dim ** -0.5
    softcap: float | None = None  # scores become c * tanh(scores / c)
    qk_norm: str = "none"  # head: per head; all: over the full projection
    fused: bool = False  # one projection for queries, keys and values

    def __post_init__(self) -> None:
        window = 1 if self.window is None else self.window
        _check_positive(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=window)
        _check_choice("qk_norm", self.qk_norm, QK_NORMS)
        if self.heads % self.kv_heads:
            raise ModelError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rope is not None and self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd, but RoPE rotates pairs of channels")

    @property
    def rotary_dim(self) -> int:
        """Number of channels per head that RoPE rotates."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are projected from one small latent.

    Each head's query and key have `plain_dim` channels from the latent and `rope_dim` channels with RoPE. All
    heads share the rotated key. The cache stores kv_rank + rope_dim values per token.
    """

    heads: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # rank of the query latent; None: no query latent
    rope: RopeSpec = RopeSpec()
    window: int | None = None

    def __post_init__(self) -> None:
        _check_positive(
            heads=self.heads,
            kv_rank=self.kv_rank,
            plain_dim=self.plain_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            q_rank=1 if self.q_rank is None else self.q_rank,
            window=1 if self.window is None else self.window,
        )
        if self.rope_dim % 2:
            raise ModelError(f"rope_dim={self.rope_dim} is odd, but RoPE rotates pairs of channels")

    @property
    def rotary_dim(self) -> int:
        """Number of channels per head that RoPE rotates."""
        return self.rope_dim


@dataclass(frozen=True)
class FeedForwardSpec:
    """A feed-forward layer: down(activation(up(x))), or down(activation(gate(x)) * up(x)) if gated."""

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    fused: bool = False  # one projection for gate and up

    def __post_init__(self) -> None:
        _check_positive(width=self.width)
        _check_choice("activation", self.activation, ACTIVATIONS)


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts: each token is routed to the `top_k` experts with the highest scores.

    Experts are gated feed-forward layers. The output is the sum of their outputs weighted by their scores,
    plus the output of the `shared` experts, which process every token. With `renormalise`, the scores of the
    chosen experts are divided by their sum. With `balance_bias`, a bias is added to the scores for the
    selection only. It gets no gradient (arXiv 2408.15664).
    """

    experts: int
    top_k: int
    width: int  # of one expert
    activation: str = "silu"
    scoring: str = "softmax"  # softmax over all experts, or sigmoid per expert as in DeepSeek-V3
    renormalise: bool = True
    scale: float = 1.0  # factor on the routed output
    shared: int = 0  # number of shared experts of the same width, computed as one layer
    balance_bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(experts=self.experts, top_k=self.top_k, width=self.width, scale=self.scale)
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("expert scoring", self.scoring, SCORINGS)
        if self.top_k > self.experts:
            raise ModelError(f"top_k={self.top_k} is larger than the number of experts ({self.experts})")
        if self.shared < 0:
            raise ModelError(f"shared={self.shared} must not be negative")


@dataclass(frozen=True)
class BlockSpec:
    """One layer, with norms before attention and feed-forward (pre), after them (post), or both (sandwich).

    A part that is None is skipped together with its norms.
    """

    attention: AttentionSpec | LatentAttentionSpec | None
    feedforward: FeedForwardSpec | ExpertsSpec | None
    placement: str = "pre"

    def __post_init__(self) -> None:
        _check_choice("norm placement", self.placement, PLACEMENTS)

    @property
    def grouped_attention(self) -> AttentionSpec:
        """The attention, which must be grouped-query attention; otherwise raises ModelError."""
        if not isinstance(self.attention, AttentionSpec):
            raise ModelError("this family requires grouped-query attention in every layer")
        return self.attention

    @property
    def dense_feedforward(self) -> FeedForwardSpec:
        """The feed-forward layer, which must be dense; otherwise raises ModelError."""
        if not isinstance(self.feedforward, FeedForwardSpec):
            raise ModelError("this family requires a dense feed-forward layer in every layer")
        return self.feedforward

    @property
    def expert_feedforward(self) -> ExpertsSpec:
        """The experts, which the layer must have; otherwise raises ModelError."""
        if not isinstance(self.feedforward, ExpertsSpec):
            raise ModelError("this family requires experts in every layer")
        return self.feedforward


@dataclass(frozen=True)
class ModelSpec:
    """The complete architecture of a decoder, without its weights."""

    family: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    tied_head: bool
    max_positions: int
    positions: str = "none"  # in addition to the RoPE of each layer
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(vocab_size=self.vocab_size, d_model=self.d_model, max_positions=self.max_positions)
        _check_positive(logit_scale=self.logit_scale)
        _check_choice("positions", self.positions, POSITIONS)
        if not self.blocks:
            raise ModelError("a model needs at least one layer")
        if len({(mixture.experts, mixture.top_k) for mixture in self.expert_specs}) > 1:
            raise ModelError(
                "all layers with experts must have the same number of experts and the same top_k"
            )

    @property
    def attention_specs(self) -> list[AttentionSpec | LatentAttentionSpec]:
        """The attention specs of all layers with attention."""
        return [block.attention for block in self.blocks if block.attention is not None]

    @property
    def expert_specs(self) -> list[ExpertsSpec]:
        """The expert specs of all layers with experts."""
        return [block.feedforward for block in self.blocks if isinstance(block.feedforward, ExpertsSpec)]

    def describe(self) -> dict[str, object]:
        """Return the spec as a JSON value, equal for equal architectures."""
        description = dataclasses.asdict(self)
        if self.logit_scale == 1.0:  # omitted, so that fingerprints from before this field stay valid
            del description["logit_scale"]
        return description

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical description, stable across machines and key order."""
        canonical = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
