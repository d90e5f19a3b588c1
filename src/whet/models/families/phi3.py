"""Phi-3: llama with fused QKV and gate-up projections."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama
from whet.models.families.config_fields import Config, integer
from whet.models.families.mistral import with_windows
from whet.models.spec import ModelSpec

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3ForCausalLM"
hf_name = llama.hf_name


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding"
    return llama.unsupported_feature(config)


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    spec = llama.from_config({"rms_norm_eps": 1e-5, **config, **llama.NO_BIASES})
    windows = [config.get("sliding_window")] * integer(config, "num_hidden_layers")
    spec = with_windows(spec, windows, family=MODEL_TYPE)
    blocks = tuple(
        replace(
            block,
            attention=replace(block.grouped_attention, fused=True),
            feedforward=replace(block.dense_feedforward, fused=True),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE]}
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "sliding_window": spec.blocks[0].grouped_attention.window}
