"""Presets of decoders to train from scratch, and the architecture choices that a config can change."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from whet.config.optim import MuP
from whet.errors import ModelError
from whet.models.families import FAMILIES
from whet.models.families import whet as whet_family
from whet.models.from_scratch.mup import with_mup_multipliers
from whet.models.spec import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)


@dataclass(frozen=True)
class Shape:
    """The architecture of a preset. A config can change each field."""

    d_model: int
    layers: int
    heads: int
    width: int  # of the feed-forward layers, or of each expert
    vocab_size: int
    max_positions: int
    kv_heads: int | None = None  # None: heads
    head_dim: int | None = None  # None: d_model / heads
    attention: str = "grouped"
    feedforward: str = "swiglu"
    experts: int | None = None  # None: one dense feed-forward layer
    top_k: int = 2
    shared_experts: int = 0
    router: str = "softmax"
    balance_bias: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-5
    placement: str = "pre"
    positions: str = "rope"
    rope_theta: float = 10_000.0
    window: int | None = None
    kv_rank: int | None = None  # of latent attention; None: d_model / 4
    bias: bool = False
    fused: bool = False
    tied_head: bool = True
    pattern: str | None = None


PRESETS: dict[str, Shape] = {
    "nano": Shape(d_model=128, layers=4, heads=4, width=352, vocab_size=1024, max_positions=512),
    "micro": Shape(d_model=320, layers=6, heads=5, width=864, vocab_size=8192, max_positions=1024),
    # as many active parameters as nano: two experts of half the width
    "nano-moe": Shape(
        d_model=128, layers=4, heads=4, width=176, vocab_size=1024, max_positions=512, experts=8
    ),
    "gpt2-small": Shape(
        d_model=768,
        layers=12,
        heads=12,
        width=3072,
        vocab_size=50257,
        max_positions=1024,
        feedforward="gelu_tanh",
        norm="layer",
        positions="learned",
        bias=True,
        fused=True,
    ),
    # the shapes of SmolLM2-135M, SmolLM2-360M and Llama-3.2-1B
    "llama-135m": Shape(
        d_model=576,
        layers=30,
        heads=9,
        kv_heads=3,
        width=1536,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=100_000.0,
    ),
    "llama-360m": Shape(
        d_model=960,
        layers=32,
        heads=15,
        kv_heads=5,
        width=2560,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=100_000.0,
    ),
    "llama-1b": Shape(
        d_model=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        width=8192,
        vocab_size=128256,
        max_positions=8192,
        rope_theta=500_000.0,
    ),
}


def _grouped(shape: Shape) -> AttentionSpec:
    if shape.head_dim is None and shape.d_model % shape.heads:
        raise ModelError(f"d_model={shape.d_model} is not a multiple of heads={shape.heads}")
    return AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.heads if shape.kv_heads is None else shape.kv_heads,
        head_dim=shape.d_model // shape.heads if shape.head_dim is None else shape.head_dim,
        rope=RopeSpec(theta=shape.rope_theta) if shape.positions == "rope" else None,
        bias=shape.bias,
        out_bias=shape.bias,
        fused=shape.fused,
    )


def _windowed(shape: Shape) -> AttentionSpec:
    if shape.window is None:
        raise ModelError("windowed attention needs a window size", hint="set model.window")
    return dataclasses.replace(_grouped(shape), window=shape.window)


def _latent(shape: Shape) -> LatentAttentionSpec:
    """RoPE channels are half as many as plain channels, as in DeepSeek-V2 (128 + 64)."""
    size = _grouped(shape).head_dim
    return LatentAttentionSpec(
        heads=shape.heads,
        kv_rank=max(1, shape.d_model // 4) if shape.kv_rank is None else shape.kv_rank,
        plain_dim=size,
        rope_dim=max(2, size // 4 * 2),
        value_dim=size,
        rope=RopeSpec(theta=shape.rope_theta),
    )


ATTENTIONS: dict[str, Callable[[Shape], AttentionSpec | LatentAttentionSpec | None]] = {
    "grouped": _grouped,
    "multi-head": lambda shape: dataclasses.replace(_grouped(shape), kv_heads=shape.heads),
    "window": _windowed,
    "latent": _latent,
    "no-position": lambda shape: dataclasses.replace(_grouped(shape), rope=None),
    "none": lambda _: None,
}

# activation, and whether the layer is gated
FEEDFORWARDS: dict[str, tuple[str, bool] | None] = {
    "swiglu": ("silu", True),
    "geglu": ("gelu_tanh", True),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "relu2": ("relu2", False),
    "none": None,
}

POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "none")

# pattern letters: the attention of the layer (None: that of the shape), and whether it has a feed-forward
LETTERS: dict[str, tuple[str | None, bool]] = {
    "*": (None, True),
    "g": ("grouped", True),
    "w": ("window", True),
    "l": ("latent", True),
    "n": ("no-position", True),
    "a": (None, False),
    "f": ("none", True),
}

_Value = TypeVar("_Value")


def _lookup(kind: str, key: str, registry: Mapping[str, _Value]) -> _Value:
    if key not in registry:
        raise ModelError(f"unknown {kind} {key!r}", hint=f"known: {', '.join(registry)}")
    return registry[key]


def preset_spec(name: str, *, mup: MuP | None = None, **changes: object) -> ModelSpec:
    """Return the spec of a preset with changes, in the first family that can represent it."""
    shape = _lookup("preset", name, PRESETS)
    fields = {field.name: field for field in dataclasses.fields(Shape)}
    for key in changes:
        _lookup("model key", key, fields)
    spec = build_spec(dataclasses.replace(shape, **changes))  # type: ignore[arg-type]  # names are checked here, values in the spec
    return _assign_family(spec if mup is None else with_mup_multipliers(spec, mup))


def build_spec(shape: Shape) -> ModelSpec:
    """Return the spec of a shape, in whet's native family."""
    if shape.layers < 1:
        raise ModelError(f"layers={shape.layers} must be positive")
    for key in ("top_k", "shared_experts", "router", "balance_bias"):
        if shape.experts is None and getattr(shape, key) != getattr(Shape, key):
            raise ModelError(f"{key} requires a model with experts", hint="set model.experts")
    _lookup("positions", shape.positions, dict.fromkeys(POSITIONS))
    pattern = shape.pattern or "*"
    letters = [pattern[layer % len(pattern)] for layer in range(shape.layers)]
    blocks = tuple(_block(shape, letter) for letter in letters)
    attentions = {LETTERS[letter][0] or shape.attention for letter in letters}
    for key, attention, letter in (("window", "window", "w"), ("kv_rank", "latent", "l")):
        if getattr(shape, key) is not None and attention not in attentions:
            raise ModelError(
                f"{key} requires layers with attention: {attention}",
                hint=f"set attention to {attention}, or use {letter} in the pattern",
            )
    return ModelSpec(
        family=whet_family.MODEL_TYPE,
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        blocks=blocks,
        norm=NormSpec(kind=shape.norm, eps=shape.norm_eps),
        tied_head=shape.tied_head,
        max_positions=shape.max_positions,
        positions="none" if shape.positions == "rope" else shape.positions,
    )


def _block(shape: Shape, letter: str) -> BlockSpec:
    attention, has_feedforward = _lookup("pattern letter", letter, LETTERS)
    return BlockSpec(
        attention=_lookup("attention", attention or shape.attention, ATTENTIONS)(shape),
        feedforward=_feedforward(shape) if has_feedforward else None,
        placement=shape.placement,
    )


def _feedforward(shape: Shape) -> FeedForwardSpec | ExpertsSpec | None:
    choice = _lookup("feedforward", shape.feedforward, FEEDFORWARDS)
    if choice is None:
        return None
    activation, gated = choice
    if shape.experts is None:
        return FeedForwardSpec(width=shape.width, activation=activation, gated=gated, bias=shape.bias)
    if not gated or shape.bias:
        raise ModelError(
            "experts must be gated and have no bias",
            hint="choose feedforward swiglu or geglu, and bias: false",
        )
    return ExpertsSpec(
        experts=shape.experts,
        top_k=shape.top_k,
        width=shape.width,
        activation=activation,
        scoring=shape.router,
        shared=shape.shared_experts,
        balance_bias=shape.balance_bias,
    )


def _assign_family(spec: ModelSpec) -> ModelSpec:
    """Return the spec under a family that can store it without loss, so that other tools can open it."""
    for name, family in FAMILIES.items():
        candidate = dataclasses.replace(spec, family=name)
        try:
            if family.from_config(family.to_config(candidate)) == candidate:
                return candidate
        except (ModelError, KeyError):
            continue
    return spec
