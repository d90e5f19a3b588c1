"""Mistral: llama with a sliding window, in every layer or in some."""

from dataclasses import replace
from typing import Any

from whet.models.families import config_fields, llama
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
unsupported = llama.unsupported
hf_name = llama.hf_name


def from_config(config: Config) -> ModelSpec:
    """Read a Hugging Face config."""
    windows = config_fields.windows({"sliding_window": 4096, **config})
    return with_windows(llama.from_config({**config, **llama.NO_BIASES}), windows, family=MODEL_TYPE)


def with_windows(spec: ModelSpec, windows: list[int | None], *, family: str) -> ModelSpec:
    """The same model under another family's name, its layers narrowed to their windows."""
    blocks = tuple(
        replace(block, attention=replace(block.grouped, window=window))
        for block, window in zip(spec.blocks, windows, strict=True)
    )
    return replace(spec, family=family, blocks=blocks)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec: the inverse of `from_config`."""
    config = {**llama.to_config(spec), "architectures": [ARCHITECTURE]}
    windows = {block.grouped.window for block in spec.blocks}
    if len(windows) > 1:
        return {**config, **config_fields.window_config(spec)}
    return {**config, "sliding_window": windows.pop()}
