"""Gemma 3 (text): Gemma 2 with norms on query and key heads, and another rope in its local layers."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, gemma2, llama
from whet.models.families.config_fields import Config, integer
from whet.models.spec import ModelSpec, RopeSpec

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = "Gemma3ForCausalLM"
hf_name = llama.hf_name

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def unsupported(config: Config) -> str | None:
    """Why this config cannot be built natively, or None."""
    config = _both_ropes(config)
    if config.get("use_bidirectional_attention"):
        return "bidirectional attention"
    activation = config_fields.activation_problem(config, "hidden_activation")
    return (
        config_fields.rope_problem(config, _LOCAL)
        or config_fields.rope_problem(config, _GLOBAL)
        or activation
    )


def _both_ropes(config: Config) -> dict[str, Any]:
    """Older configs spell the two ropes as rope_theta, rope_scaling and rope_local_base_freq."""
    given = config_fields.rope_object(config, "rope_parameters") or {_GLOBAL: {"rope_type": "default"}}
    everywhere = {
        "rope_theta": config.get("rope_theta", 1_000_000.0),
        **config_fields.rope_object(given, _GLOBAL),
        **config_fields.rope_object(config, "rope_scaling"),
    }
    local = {
        "rope_theta": config.get("rope_local_base_freq", 10_000.0),
        **config_fields.rope_object(given, _LOCAL),
    }
    spent = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
    plain = {key: value for key, value in config.items() if key not in spent}
    return {**plain, "rope_parameters": {_GLOBAL: everywhere, _LOCAL: local}}


def from_config(config: Config) -> ModelSpec:
    """Read a Hugging Face config."""
    layers = integer(config, "num_hidden_layers")
    every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    kinds = [_LOCAL if (layer + 1) % every else _GLOBAL for layer in range(layers)]
    config = _both_ropes({**config, "layer_types": config.get("layer_types") or kinds})
    ropes = {kind: config_fields.rope(config, kind) for kind in (_LOCAL, _GLOBAL)}
    # the class reads no attn_logit_softcapping: its head norms bound the scores
    spec = gemma2.read({**config, "rope_parameters": {}, "attn_logit_softcapping": None}, family=MODEL_TYPE)
    blocks = tuple(
        replace(block, attention=replace(block.grouped, qk_norm="head", rope=ropes[kind]))
        for block, kind in zip(spec.blocks, config["layer_types"], strict=True)
    )
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec: the inverse of `from_config`."""
    ropes: dict[str, RopeSpec] = {_LOCAL: RopeSpec(), _GLOBAL: RopeSpec(1_000_000.0)}
    for block in spec.blocks:
        kind = _GLOBAL if block.grouped.window is None else _LOCAL
        ropes[kind] = block.grouped.rope or ropes[kind]
    parameters = {kind: config_fields.rope_config(rope) for kind, rope in ropes.items()}
    return {**gemma2.write(spec, ARCHITECTURE), "rope_parameters": parameters, **older_rope_keys(parameters)}


def older_rope_keys(parameters: Config) -> dict[str, Any]:
    """The keys of transformers 4 for `rope_parameters` of two kinds of layers."""
    older = config_fields.older_rope_keys(parameters[_GLOBAL])
    return {**older, "rope_local_base_freq": parameters[_LOCAL]["rope_theta"]}
