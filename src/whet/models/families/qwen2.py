"""Qwen2 and Qwen2.5: llama with QKV biases, and sliding windows in some layers."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config
from whet.models.families.mistral import with_windows
from whet.models.spec import ModelSpec

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    spec = with_windows(
        llama.from_config({**config, "attention_bias": True, "mlp_bias": False}),
        windows(config),
        family=MODEL_TYPE,
    )
    # queries, keys and values have biases, the output projection has none
    blocks = tuple(replace(b, attention=replace(b.grouped_attention, out_bias=False)) for b in spec.blocks)
    return replace(spec, blocks=blocks)


def windows(config: Config) -> list[int | None]:
    """Return each layer's sliding window. Without `layer_types`, layers from `max_window_layers` have one."""
    used = bool(config.get("use_sliding_window", False))
    if used and not config.get("layer_types"):
        layers, full = (
            config_fields.integer(config, "num_hidden_layers"),
            int(config.get("max_window_layers", 28)),
        )
        kinds = ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
        config = {**config, "layer_types": kinds}
    return config_fields.windows({"sliding_window": 4096, **config}, used=used)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE], **config_fields.window_config(spec)}
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "use_sliding_window": config["sliding_window"] is not None}
