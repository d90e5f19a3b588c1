"""Phi-3: llama with fused projections (queries, keys and values; gate and up)."""

from dataclasses import replace
from typing import Any

from whet.models.families import common, llama
from whet.models.families.common import Config
from whet.models.families.mistral import with_windows
from whet.models.spec import ModelSpec

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3ForCausalLM"
unsupported = llama.unsupported
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Read a Hugging Face config."""
    spec = llama.from_config({"rms_norm_eps": 1e-5, **config})
    spec = with_windows(spec, common.windows(config), family=MODEL_TYPE)
    blocks = tuple(
        replace(
            block,
            attention=replace(block.grouped, fused=True),
            feedforward=replace(block.dense, fused=True),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec: the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE]}
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "sliding_window": spec.blocks[0].grouped.window}
