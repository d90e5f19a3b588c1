"""The architectures of GGUF files: one table of metadata keys, and of what llama.cpp computes for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Field:
    """A metadata key, without the name of the architecture, and the config.json key with the same value."""

    key: str
    config_key: str
    number: type[int] | type[float] = int
    default: float | None = None  # of a file without the key; None means that the key is required


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp reads the files of one architecture, in terms of a family's config.json."""

    name: str
    family: str
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # Any: values of config.json, which no key changes
    adjacent_rotary: bool = False  # RoPE rotates channels 2i and 2i + 1, not i and i + half a head
    any_head_size: bool = True  # otherwise hidden_size / num_attention_heads
    optional_biases: bool = False  # on all projections of attention, and of the feed-forward layer
    head: str = "optional"  # "required": no tied embeddings; "tied": no separate output head
    scalings: tuple[str, ...] = ("linear", "yarn")  # of RoPE
    window_period: int = 0  # without a pattern, one layer in so many has no sliding window; 0: no windows
    wide_layers: int = 0  # with so many layers, the scores have the scale (hidden_size / heads) ** -0.5
    has_local_rope: bool = False  # whether layers with a window have a base frequency of their own


_SIZES = (
    Field("block_count", "num_hidden_layers"),
    Field("context_length", "max_position_embeddings"),
    Field("embedding_length", "hidden_size"),
    Field("attention.head_count", "num_attention_heads"),
    Field("attention.head_count_kv", "num_key_value_heads"),
    Field("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
)
_WIDTH = Field("feed_forward_length", "intermediate_size")
_DENSE = (*_SIZES, _WIDTH)
_TOP_K = Field("expert_used_count", "num_experts_per_tok")
_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}

# a name with two rows is resolved by whether the file has experts
ARCHITECTURES = (
    Architecture(
        "llama",
        "llama",
        _DENSE,
        _SILU,
        adjacent_rotary=True,
        optional_biases=True,
        scalings=("linear", "yarn", "llama3"),
    ),
    Architecture(
        "llama",
        "mixtral",
        (*_DENSE, Field("expert_count", "num_local_experts"), _TOP_K),
        {**_SILU, "sliding_window": None},
        adjacent_rotary=True,
        scalings=("linear", "yarn", "llama3"),
    ),
    Architecture("qwen2", "qwen2", _DENSE, _SILU, any_head_size=False),
    Architecture("qwen3", "qwen3", _DENSE, _SILU),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        (
            *_SIZES,
            Field("expert_feed_forward_length", "moe_intermediate_size"),
            Field("expert_count", "num_experts"),
            _TOP_K,
        ),
        {**_SILU, "norm_topk_prob": True},
    ),
    Architecture(
        "gemma2",
        "gemma2",
        (
            *_DENSE,
            Field("attention.sliding_window", "sliding_window", default=4096),
            Field("attn_logit_softcapping", "attn_logit_softcapping", float, 50.0),
            Field("final_logit_softcapping", "final_logit_softcapping", float, 30.0),
        ),
        _GELU,
        head="tied",
        window_period=2,
        wide_layers=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        (
            *_DENSE,
            Field("attention.sliding_window", "sliding_window", default=0),
            Field("final_logit_softcapping", "final_logit_softcapping", float, 0.0),
        ),
        _GELU,
        scalings=("linear",),
        window_period=6,
        wide_layers=62,
        has_local_rope=True,
    ),
    Architecture("phi3", "phi3", _DENSE, _SILU, any_head_size=False, scalings=()),
    Architecture("olmo2", "olmo2", _DENSE, _SILU, any_head_size=False, head="required"),
    Architecture(
        "olmoe",
        "olmoe",
        (*_DENSE, Field("expert_count", "num_experts"), _TOP_K),
        {**_SILU, "norm_topk_prob": False},
        any_head_size=False,
        head="required",
    ),
    # llama.cpp omits RoPE in every fourth layer
    Architecture("smollm3", "smollm3", _DENSE, {**_SILU, "no_rope_layer_interval": 4}, adjacent_rotary=True),
    Architecture(
        "granite",
        "granite",
        (
            *_DENSE,
            Field("attention.scale", "attention_multiplier", float, 0.0),
            Field("embedding_scale", "embedding_multiplier", float, 1.0),
            Field("residual_scale", "residual_multiplier", float, 1.0),
            Field("logit_scale", "logits_scaling", float),
        ),
        _SILU,
        adjacent_rotary=True,
        optional_biases=True,
        scalings=("linear", "yarn", "llama3"),
    ),
    Architecture(
        "gpt2",
        "gpt2",
        (
            Field("block_count", "n_layer"),
            Field("context_length", "n_positions"),
            Field("embedding_length", "n_embd"),
            Field("attention.head_count", "n_head"),
            Field("feed_forward_length", "n_inner"),
            Field("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
        ),
        {"activation_function": "gelu_new"},
        any_head_size=False,
        scalings=(),
    ),
)
