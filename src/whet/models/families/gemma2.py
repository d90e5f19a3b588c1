"""Gemma 2: sandwich norms with offset, scaled embeddings, softcapped scores and logits, local layers."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config, integer
from whet.models.families.mistral import with_windows
from whet.models.spec import ModelSpec, NormSpec, RopeSpec

MODEL_TYPE = "gemma2"
ARCHITECTURE = "Gemma2ForCausalLM"
hf_name = llama.hf_name


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    if config.get("use_bidirectional_attention"):
        return "bidirectional attention"
    return config_fields.unsupported_rope(config) or config_fields.unsupported_activation(
        config, "hidden_activation"
    )


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    layers = integer(config, "num_hidden_layers")
    alternating = ["sliding_attention", "full_attention"] * layers
    defaults = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    kinds = config.get("layer_types") or alternating[:layers]
    return read_config({**defaults, **config, "layer_types": kinds}, family=MODEL_TYPE)


def read_config(config: Config, *, family: str) -> ModelSpec:
    """Return the spec of a config, as far as Gemma 2 and Gemma 3 share it."""
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    defaults = {"tie_word_embeddings": True, "head_dim": 256}
    spec = llama.from_config({**defaults, **config, "hidden_act": activation, "mlp_bias": False})
    spec = with_windows(spec, config_fields.windows({"sliding_window": 4096, **config}), family=family)
    blocks = tuple(
        replace(
            block,
            placement="sandwich",
            attention=replace(
                block.grouped_attention,
                scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
                softcap=config.get("attn_logit_softcapping"),
            ),
        )
        for block in spec.blocks
    )
    return replace(
        spec,
        blocks=blocks,
        norm=NormSpec(eps=spec.norm.eps, offset=True),
        embedding_scale=spec.d_model**0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    attention = spec.blocks[0].grouped_attention
    return {**write_config(spec, ARCHITECTURE), **config_fields.rope_keys(attention.rope or RopeSpec())}


def write_config(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return the config fields that Gemma 2 and Gemma 3 share."""
    attention = spec.blocks[0].grouped_attention
    windows = config_fields.window_config(spec)
    return {
        **config_fields.common_config(spec, architecture=architecture),
        **windows,
        "sliding_window": windows["sliding_window"] or 4096,  # the config class requires a value
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "hidden_activation": config_fields.activation_name(spec.blocks[0].dense_feedforward.activation),
        "query_pre_attn_scalar": round((attention.scale or attention.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
