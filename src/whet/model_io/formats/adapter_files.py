"""Read and write adapters: `whet.save_adapter` and `whet.load_adapter`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.adapters.adapter import LoRASettings
from whet.adapters.nf4 import BLOCK, NF4Linear
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.model_io.config_json import write_generation_config
from whet.model_io.file_checks import check_links
from whet.model_io.formats.adapter_state import MLX_WEIGHTS, attach_stored, collect_adapter
from whet.model_io.formats.classifier_head import StoredHead
from whet.model_io.formats.peft import read_peft, read_peft_settings
from whet.model_io.resolve_model import hub_id
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.language_model import LanguageModel
from whet.storage import create_directory_atomically, remove_temporary_files, write_json

CONFIG = "adapter_config.json"
QUANTIZATION_FILE = "base_quantization.json"  # specific to whet, in both layouts: how to quantize the base
TRAINED_ON = "trained_on.json"  # specific to whet, for bases with a hub id: the local copy of that model
NF4_BASE = {"kind": "nf4", "block_size": BLOCK, "double_quantization": True}
LAYOUTS = {"peft": "whet.model_io.formats.peft:write_peft", "mlx": "whet.model_io.formats.mlx:write_mlx"}


def save_adapter(
    model: LanguageModel,
    directory: str | Path,
    layout: str = "peft",
    *,
    tokenizer: Any = None,  # Any: a transformers tokenizer
    base: Path | None = None,
    classifier: StoredHead | None = None,
) -> None:
    """Write the adapter as a directory that PEFT or mlx-lm loads.

    Args:
        model: A model with adapters.
        directory: The directory to write. An existing non-empty directory is never overwritten.
        layout: "peft" or "mlx".
        tokenizer: A transformers tokenizer to save with the adapter.
        base: A directory with the base weights that the adapter was trained on, dequantized if they were
            quantized. By default the adapter refers to the model that was loaded.
        classifier: The head of a classifier, saved with the adapter.

    Raises:
        ConfigError: If the layout is unknown.
        ModelError: If the model has no adapter, or the layout cannot represent it.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown adapter layout {layout!r}", hint=f"use one of {', '.join(LAYOUTS)}")
    base_reference = base_name(model) if base is None else str(base.absolute())
    stored = replace(collect_adapter(model), base=base_reference)
    if classifier is not None:
        stored = replace(stored, parameters=stored.parameters | classifier.tensors(model))
    is_quantized = base is None and any(isinstance(module, NF4Linear) for module in model.modules())
    directory = Path(directory)
    remove_temporary_files(directory.parent, only_name=directory.name)
    with create_directory_atomically(directory) as staging:
        if tokenizer is not None:
            save_tokenizer(tokenizer, staging)
            write_generation_config(staging, model.hf_config(), source=model.source, tokenizer=tokenizer)
        load_object(LAYOUTS[layout])(staging, model, stored)
        if classifier is not None:
            classifier.write(staging)
        if is_quantized:
            write_json(staging / QUANTIZATION_FILE, NF4_BASE)
        if base is None and model.source is not None and base_reference == hub_id(str(model.name)):
            write_json(staging / TRAINED_ON, {"name": model.name, "directory": str(model.source.absolute())})


def base_name(model: LanguageModel) -> str | None:
    """Return a name by which other programs can load the base: a path, a hub id, or the source directory."""
    if model.name is None or Path(model.name).exists():
        return model.name
    return hub_id(model.name) or (model.name if model.source is None else str(model.source.absolute()))


def load_adapter(model: LanguageModel, directory: str | Path) -> LanguageModel:
    """Attach an adapter from a directory in the PEFT or mlx-lm layout, in place.

    Args:
        model: The base model, without adapters.
        directory: The adapter directory.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model already has adapters.
        ModelError: If the files are invalid, or a tensor does not match this model.
    """
    directory = Path(directory)
    check_links(directory)
    if (directory / MLX_WEIGHTS).is_file():
        stored = load_object("whet.model_io.formats.mlx:read_mlx")(directory)
    else:
        stored = read_peft(directory, model)
    attach_stored(model, stored, directory=directory)
    return model


def read_adapter_settings(directory: Path) -> LoRASettings:
    """Read the settings of an adapter directory in either layout; some layers may have others."""
    check_links(directory)
    if (directory / MLX_WEIGHTS).is_file():
        settings: LoRASettings = load_object("whet.model_io.formats.mlx:read_mlx_settings")(directory)
        return settings
    return read_peft_settings(directory)
