"""Qwen3: llama with an explicit head size and QK norms per head."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config
from whet.models.families.mistral import with_windows
from whet.models.families.qwen2 import windows
from whet.models.spec import ModelSpec

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    fields = {**config, "head_dim": config.get("head_dim") or 128, "mlp_bias": False}
    spec = with_windows(llama.from_config(fields), windows(config), family=MODEL_TYPE)
    blocks = tuple(replace(b, attention=replace(b.grouped_attention, qk_norm="head")) for b in spec.blocks)
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE], **config_fields.window_config(spec)}
    del config["mlp_bias"]
    return {**config, "use_sliding_window": config["sliding_window"] is not None}
