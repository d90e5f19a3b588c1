"""Mistral: llama with sliding windows in all or some layers."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    windows = config_fields.windows({"sliding_window": 4096, **config})
    return with_windows(llama.from_config({**config, **llama.NO_BIASES}), windows, family=MODEL_TYPE)


def with_windows(spec: ModelSpec, windows: list[int | None], *, family: str) -> ModelSpec:
    """Return the spec with another family name and a sliding window per layer."""
    blocks = tuple(
        replace(block, attention=replace(block.grouped_attention, window=window))
        for block, window in zip(spec.blocks, windows, strict=True)
    )
    return replace(spec, family=family, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE]}
    windows = {block.grouped_attention.window for block in spec.blocks}
    if len(windows) > 1:
        return {**config, **config_fields.window_config(spec)}
    return {**config, "sliding_window": windows.pop()}
