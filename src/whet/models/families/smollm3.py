"""SmolLM3: llama with some layers without RoPE."""

from dataclasses import replace
from typing import Any

from whet.errors import ModelError
from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config, integer
from whet.models.families.mistral import with_windows
from whet.models.spec import ModelSpec, RopeSpec

MODEL_TYPE = "smollm3"
ARCHITECTURE = "SmolLM3ForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    layers = integer(config, "num_hidden_layers")
    interval = int(config.get("no_rope_layer_interval", 4))
    has_rope = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(has_rope) != layers:
        raise ModelError(
            f"config.json: no_rope_layers has {len(has_rope)} entries, but num_hidden_layers={layers}"
        )
    defaults = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
    spec = llama.from_config({**defaults, **config})
    no_rope_kind = "sliding_attention" if config.get("use_sliding_window") else "full_attention"
    kinds = config.get("layer_types") or ["full_attention" if has else no_rope_kind for has in has_rope]
    spec = with_windows(spec, config_fields.windows({**config, "layer_types": kinds}), family=MODEL_TYPE)
    blocks = tuple(
        block if has else replace(block, attention=replace(block.grouped_attention, rope=None))
        for block, has in zip(spec.blocks, has_rope, strict=True)
    )
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    ropes = [block.grouped_attention.rope for block in spec.blocks]
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE], **config_fields.window_config(spec)}
    return {
        **config,
        **config_fields.rope_keys(next((rope for rope in ropes if rope is not None), RopeSpec())),
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "use_sliding_window": config["sliding_window"] is not None,
    }
