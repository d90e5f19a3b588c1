"""What the config.json of most families has in common: sizes, rope, layer kinds, and writing them back."""

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
# transformers' names of activations, as whet's
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def integer(config: Config, key: str) -> int:
    """A size that must be there."""
    if key not in config:
        raise ModelError(f"config.json has no {key!r}")
    try:
        return int(config[key])
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: {key}={config[key]!r} is not a whole number") from error


def head_dim(config: Config) -> int:
    """The size of a head: given, or an equal share of the hidden size."""
    if config.get("head_dim"):
        return integer(config, "head_dim")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(
            f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def windows(config: Config, *, used: bool = True) -> list[int | None]:
    """The sliding window of each layer, from `layer_types` where there are some."""
    layers, window = integer(config, "num_hidden_layers"), config.get("sliding_window")
    if not used or window is None:
        return [None] * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types lists {len(kinds)} layers of num_hidden_layers={layers}")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"config.json: unknown layer_types {sorted(unknown)}")
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def rope_fields(config: Config, kind: str | None = None) -> dict[str, Any]:
    """Rope settings from either spelling: `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
    given = rope_object(config, "rope_scaling") or rope_object(config, "rope_parameters")
    fields = {"rope_theta": config.get("rope_theta", 10_000.0)}
    fields |= rope_object(given, kind) if kind is not None else given
    fields["rope_type"] = fields.get("rope_type", fields.get("type", "default"))
    return fields


def rope_object(config: Config, key: str) -> dict[str, Any]:
    """One of the objects in which rope settings are written, empty where it is missing."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ModelError(f"config.json: {key} must be an object")
    return found


def rope_problem(config: Config, kind: str | None = None) -> str | None:
    """Why these rope settings cannot be built natively, or None."""
    fields = rope_fields(config, kind)
    if fields["rope_type"] not in ROPE_TYPES:
        return f"rope type {fields['rope_type']!r}"
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding"
    return None


def rope(config: Config, kind: str | None = None) -> RopeSpec:
    """The rope of a config, or of one of its kinds of layer."""
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
    """The length before the scaling: in transformers that of the config itself comes first."""
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
    """The `rope_parameters` of a rope: the inverse of `rope`."""
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


def both_rope_spellings(spec: RopeSpec) -> dict[str, Any]:
    """`rope_parameters`, which transformers 5 reads, and the keys that transformers 4 reads."""
    fields = rope_config(spec)
    return {"rope_parameters": fields, **older_rope_keys(fields)}


def older_rope_keys(fields: Config) -> dict[str, Any]:
    """The keys of transformers 4 for `rope_parameters`; it ignores those, and silently uses its defaults."""
    kind = fields.get("rope_type", "default")
    older = {
        "rope_theta": fields.get("rope_theta"),
        "rope_scaling": None if kind == "default" else dict(fields),
    }
    if "partial_rotary_factor" in fields:
        older["partial_rotary_factor"] = fields["partial_rotary_factor"]
    return older


def activation(config: Config) -> str:
    """The feed-forward activation under whet's name."""
    return ACTIVATIONS[config.get("hidden_act") or "silu"]


def activation_name(activation: str) -> str:
    """transformers' name of one of whet's activations."""
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation


def activation_problem(config: Config, key: str = "hidden_act") -> str | None:
    """Why the activation cannot be built natively, or None."""
    name = config.get(key) or "silu"
    return None if name in ACTIVATIONS else f"activation {name!r}"


def common_config(spec: ModelSpec, *, architecture: str) -> dict[str, Any]:
    """The keys that every llama-like family writes."""
    attention, feedforward = spec.blocks[0].grouped, spec.blocks[0].dense
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
    """`sliding_window` and `layer_types` of a model whose layers may differ."""
    found = [block.grouped.window for block in spec.blocks]
    return {
        "sliding_window": next((window for window in found if window is not None), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in found],
    }
