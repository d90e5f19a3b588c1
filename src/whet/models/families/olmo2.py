"""OLMo 2: norms after attention and feed-forward, and QK norms over the full projections."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "olmo2"
ARCHITECTURE = "Olmo2ForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    spec = llama.from_config({"rms_norm_eps": 1e-5, **config, "mlp_bias": False})
    blocks = tuple(
        replace(block, placement="post", attention=replace(block.grouped_attention, qk_norm="all"))
        for block in spec.blocks
    )
    return replace(spec, family=MODEL_TYPE, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE]}
    del config["mlp_bias"]
    return config
