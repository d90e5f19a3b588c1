"""Granite: llama with multipliers on embeddings, scores and logits, as in muP."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "granite"
ARCHITECTURE = "GraniteForCausalLM"
hf_name = llama.hf_name


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    if config.get("residual_multiplier", 1.0) != 1.0:
        return "a residual_multiplier other than 1"
    return llama.unsupported_feature(config)


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    spec = llama.from_config(config)
    attention = spec.blocks[0].grouped_attention
    scale: float | None = float(config.get("attention_multiplier", 1.0))
    if scale == attention.head_dim**-0.5:
        scale = None
    block = replace(spec.blocks[0], attention=replace(attention, scale=scale))
    return replace(
        spec,
        family=MODEL_TYPE,
        blocks=(block,) * len(spec.blocks),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        logit_scale=1 / float(config.get("logits_scaling", 1.0)),
    )


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    attention = spec.blocks[0].grouped_attention
    return {
        **llama.to_config(spec),
        "architectures": [ARCHITECTURE],
        "attention_multiplier": attention.head_dim**-0.5 if attention.scale is None else attention.scale,
        "embedding_multiplier": spec.embedding_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "residual_multiplier": 1.0,
    }
