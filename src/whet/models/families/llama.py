"""The llama family: Llama 1-3, SmolLM2, TinyLlama and every other checkpoint that calls itself llama."""

from collections.abc import Mapping
from typing import Any

from whet.errors import ModelError
from whet.models.spec import (
    AttentionSpec,
    BlockSpec,
    FeedForwardSpec,
    Llama3RopeScaling,
    ModelSpec,
    RopeSpec,
)

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"

# Any: the values of a config.json, checked as they are read
Config = Mapping[str, Any]


def _rope_fields(config: Config) -> dict[str, Any]:
    """Rope settings from either spelling: `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
    fields = {"rope_theta": config.get("rope_theta", 10_000.0)}
    fields |= config.get("rope_scaling") or {}
    fields |= config.get("rope_parameters") or {}
    fields["rope_type"] = fields.get("rope_type", fields.get("type", "default"))
    return fields


def unsupported(config: Config) -> str | None:
    """Why this config cannot be built natively, or None."""
    rope_type = _rope_fields(config)["rope_type"]
    if rope_type not in ("default", "llama3"):
        return f"rope type {rope_type!r}"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    return None


def from_config(config: Config) -> ModelSpec:
    """Read a Hugging Face config."""
    try:
        heads = int(config["num_attention_heads"])
        d_model = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        width = int(config["intermediate_size"])
        vocab_size = int(config["vocab_size"])
    except KeyError as error:
        raise ModelError(f"config.json has no {error.args[0]!r}") from error
    head_dim = config.get("head_dim")
    if head_dim is None and d_model % heads:
        raise ModelError(f"hidden_size={d_model} is not a multiple of num_attention_heads={heads}")
    rope = _rope_fields(config)
    block = BlockSpec(
        attention=AttentionSpec(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim or d_model // heads),
            bias=bool(config.get("attention_bias", False)),
        ),
        feedforward=FeedForwardSpec(width=width, bias=bool(config.get("mlp_bias", False))),
    )
    return ModelSpec(
        family=MODEL_TYPE,
        vocab_size=vocab_size,
        d_model=d_model,
        blocks=(block,) * layers,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeSpec(theta=float(rope["rope_theta"]), scaling=_llama3_scaling(rope)),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
    )


def _llama3_scaling(rope: Config) -> Llama3RopeScaling | None:
    if rope["rope_type"] != "llama3":
        return None
    try:
        return Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json: llama3 rope scaling has no {error.args[0]!r}") from error


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec: the inverse of `from_config`."""
    block = spec.blocks[0]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope.theta}
    if (scaling := spec.rope.scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": block.attention.heads,
        "num_key_value_heads": block.attention.kv_heads,
        "head_dim": block.attention.head_dim,
        "attention_bias": block.attention.bias,
        "intermediate_size": block.feedforward.width,
        "hidden_act": block.feedforward.activation,
        "mlp_bias": block.feedforward.bias,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_head,
        # two spellings: transformers 5 reads the first, older readers the other two
        "rope_parameters": rope,
        "rope_theta": spec.rope.theta,
        "rope_scaling": rope if spec.rope.scaling is not None else None,
    }


def hf_name(name: str) -> str:
    """Hugging Face's name for one of the decoder's parameters or modules."""
    return name if name.startswith("lm_head") else f"model.{name}"
