"""Reading and writing of the config.json fields that most families share: sizes, RoPE and layer types."""

import math
from collections.abc import Mapping
from typing import Any

from whet.errors import ModelError
from whet.models.spec import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnRopeScaling,
)

Config = Mapping[str, Any]  # Any: the values of a config.json, checked as they are read

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# activation names of transformers to those of whet
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def integer(config: Config, key: str) -> int:
    """Return a required integer field."""
    if key not in config:
        raise ModelError(f"config.json has no {key!r}")
    try:
        return int(config[key])
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: {key}={config[key]!r} is not an integer") from error


def head_dim(config: Config) -> int:
    """Return the head size: `head_dim`, or hidden_size / num_attention_heads."""
    if config.get("head_dim"):
        return integer(config, "head_dim")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(
            f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def windows(config: Config, *, used: bool = True) -> list[int | None]:
    """Return the sliding window of each layer, according to `layer_types` if present."""
    layers, window = integer(config, "num_hidden_layers"), config.get("sliding_window")
    if not used or window is None:
        return [None] * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries, but num_hidden_layers={layers}")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"config.json: unknown layer_types {sorted(unknown)}")
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def rope_fields(config: Config, kind: str | None = None) -> dict[str, Any]:
    """Return the RoPE settings, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    settings = rope_section(config, "rope_scaling") or rope_section(config, "rope_parameters")
    fields = {"rope_theta": config.get("rope_theta", 10_000.0)}
    fields |= rope_section(settings, kind) if kind is not None else settings
    fields["rope_type"] = fields.get("rope_type", fields.get("type", "default"))
    return fields


def rope_section(config: Config, key: str) -> dict[str, Any]:
    """Return an object with RoPE settings, or an empty one if the key is missing."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} must be an object")
    return value


def unsupported_rope(config: Config, kind: str | None = None) -> str | None:
    """Return the RoPE feature that is not supported natively, or None."""
    fields = rope_fields(config, kind)
    if fields["rope_type"] not in ROPE_TYPES:
        return f"rope type {fields['rope_type']!r}"
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding"
    return None


def rope(config: Config, kind: str | None = None) -> RopeSpec:
    """Return the RoPE of a config, or of one of its layer types."""
    fields = rope_fields(config, kind)
    return RopeSpec(theta=float(fields["rope_theta"]), scaling=_scaling(fields, config))


def _scaling(fields: Config, config: Config) -> RopeScaling | None:
    try:
        match fields["rope_type"]:
            case "linear":
                return LinearRopeScaling(factor=float(fields["factor"]))
            case "llama3":
                return Llama3RopeScaling(
                    factor=float(fields["factor"]),
                    low_freq_factor=float(fields["low_freq_factor"]),
                    high_freq_factor=float(fields["high_freq_factor"]),
                    original_max_positions=_original_positions(fields, config),
                )
            case "yarn":
                return YarnRopeScaling(
                    factor=float(fields["factor"]),
                    original_max_positions=_original_positions(fields, config),
                    attention_factor=_yarn_attention_factor(fields),
                    beta_fast=float(fields.get("beta_fast") or 32),
                    beta_slow=float(fields.get("beta_slow") or 1),
                    truncate=bool(fields.get("truncate", True)),
                )
    except KeyError as error:
        raise ModelError(
            f"config.json: {fields['rope_type']} rope scaling has no {error.args[0]!r}"
        ) from error
    return None


def _original_positions(fields: Config, config: Config) -> int:
    """Return the context length before scaling. As in transformers, the top-level field has priority."""
    key = "original_max_position_embeddings"
    return int(config.get(key) or fields.get(key) or config["max_position_embeddings"])


def _yarn_attention_factor(fields: Config) -> float:
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def temperature(weight: float) -> float:
        factor = float(fields["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return temperature(fields["mscale"]) / temperature(fields["mscale_all_dim"])
    return temperature(1.0)


def rope_config(spec: RopeSpec) -> dict[str, Any]:
    """Return the `rope_parameters` of a RoPE, the inverse of `rope`."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.theta}
    match spec.scaling:
        case LinearRopeScaling(factor=factor):
            fields |= {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling() as scaling:
            fields |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnRopeScaling() as scaling:
            fields |= {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
    return fields


def rope_keys(spec: RopeSpec) -> dict[str, Any]:
    """Return both `rope_parameters`, for transformers 5, and the older keys, for transformers 4."""
    fields = rope_config(spec)
    return {"rope_parameters": fields, **older_rope_keys(fields)}


def older_rope_keys(fields: Config) -> dict[str, Any]:
    """Return the transformers 4 keys for `rope_parameters`, which version 4 silently ignores."""
    kind = fields.get("rope_type", "default")
    older = {
        "rope_theta": fields.get("rope_theta"),
        "rope_scaling": None if kind == "default" else dict(fields),
    }
    if "partial_rotary_factor" in fields:
        older["partial_rotary_factor"] = fields["partial_rotary_factor"]
    return older


def activation(config: Config) -> str:
    """Return whet's name of the feed-forward activation."""
    return ACTIVATIONS[config.get("hidden_act") or "silu"]


def activation_name(activation: str) -> str:
    """Return the transformers name of an activation."""
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation


def unsupported_activation(config: Config, key: str = "hidden_act") -> str | None:
    """Return a description of the activation if it is not supported natively, or None."""
    name = config.get(key) or "silu"
    return None if name in ACTIVATIONS else f"activation {name!r}"


def common_config(spec: ModelSpec, *, architecture: str) -> dict[str, Any]:
    """Return the config fields shared by all llama-like families."""
    attention, feedforward = spec.blocks[0].grouped_attention, spec.blocks[0].dense_feedforward
    return {
        "model_type": spec.family,
        "architectures": [architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": feedforward.width,
        "rms_norm_eps": spec.norm.eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_head,
    }


def window_config(spec: ModelSpec) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types` of a model whose layers may differ."""
    windows = [block.grouped_attention.window for block in spec.blocks]
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }
