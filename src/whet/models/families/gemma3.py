"""Gemma 3 (text): Gemma 2 with QK norms per head, and a different RoPE in local layers."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, gemma2, llama
from whet.models.families.config_fields import Config, integer
from whet.models.spec import ModelSpec, RopeSpec

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = "Gemma3ForCausalLM"
hf_name = llama.hf_name

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    config = _with_rope_parameters(config)
    if config.get("use_bidirectional_attention"):
        return "bidirectional attention"
    activation = config_fields.unsupported_activation(config, "hidden_activation")
    return (
        config_fields.unsupported_rope(config, _LOCAL)
        or config_fields.unsupported_rope(config, _GLOBAL)
        or activation
    )


def _with_rope_parameters(config: Config) -> dict[str, Any]:
    """Return the config with `rope_parameters` for both layer types.

    Older configs have rope_theta, rope_scaling and rope_local_base_freq instead.
    """
    parameters = config_fields.rope_section(config, "rope_parameters") or {_GLOBAL: {"rope_type": "default"}}
    global_rope = {
        "rope_theta": config.get("rope_theta", 1_000_000.0),
        **config_fields.rope_section(parameters, _GLOBAL),
        **config_fields.rope_section(config, "rope_scaling"),
    }
    local_rope = {
        "rope_theta": config.get("rope_local_base_freq", 10_000.0),
        **config_fields.rope_section(parameters, _LOCAL),
    }
    replaced = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
    other_fields = {key: value for key, value in config.items() if key not in replaced}
    return {**other_fields, "rope_parameters": {_GLOBAL: global_rope, _LOCAL: local_rope}}


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    layers = integer(config, "num_hidden_layers")
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    kinds = [_LOCAL if (layer + 1) % pattern else _GLOBAL for layer in range(layers)]
    config = _with_rope_parameters({**config, "layer_types": config.get("layer_types") or kinds})
    ropes = {kind: config_fields.rope(config, kind) for kind in (_LOCAL, _GLOBAL)}
    # the transformers class ignores attn_logit_softcapping, because the QK norms bound the scores
    spec = gemma2.read_config(
        {**config, "rope_parameters": {}, "attn_logit_softcapping": None}, family=MODEL_TYPE
    )
    blocks = tuple(
        replace(block, attention=replace(block.grouped_attention, qk_norm="head", rope=ropes[kind]))
        for block, kind in zip(spec.blocks, config["layer_types"], strict=True)
    )
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    ropes: dict[str, RopeSpec] = {_LOCAL: RopeSpec(), _GLOBAL: RopeSpec(1_000_000.0)}
    for block in spec.blocks:
        kind = _GLOBAL if block.grouped_attention.window is None else _LOCAL
        ropes[kind] = block.grouped_attention.rope or ropes[kind]
    parameters = {kind: config_fields.rope_config(rope) for kind, rope in ropes.items()}
    return {
        **gemma2.write_config(spec, ARCHITECTURE),
        "rope_parameters": parameters,
        **older_rope_keys(parameters),
    }


def older_rope_keys(parameters: Config) -> dict[str, Any]:
    """Return the transformers 4 keys for `rope_parameters` of two layer types."""
    older = config_fields.older_rope_keys(parameters[_GLOBAL])
    return {**older, "rope_local_base_freq": parameters[_LOCAL]["rope_theta"]}
