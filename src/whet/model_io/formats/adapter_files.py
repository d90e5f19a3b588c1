"""Adapters on disk: `whet.save_adapter` and `whet.load_adapter`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.adapters.nf4 import BLOCK, NF4Linear
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.model_io.file_checks import check_links
from whet.model_io.formats.adapter_state import MLX_WEIGHTS, attach_stored, collect
from whet.model_io.formats.classifier_head import StoredHead
from whet.model_io.formats.peft import read_peft
from whet.model_io.hub import hub_id
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.language_model import LanguageModel
from whet.storage import clear_leftovers, new_directory, write_json

CONFIG = "adapter_config.json"
QUANTISED = "base_quantization.json"  # whet's own, beside either layout: how to quantise the base
TRAINED_ON = "trained_on.json"  # whet's own, beside a hub id: the copy of that model on this machine
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
    """Write the adapter as a directory that PEFT, or mlx-lm, loads.

    It names what the model was loaded from as its base, or `base`: a directory with the weights as they were
    trained on, quantised or not. The head of a classifier goes with it.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown adapter layout {layout!r}", hint=f"known: {', '.join(LAYOUTS)}")
    origin = base_name(model) if base is None else str(base.absolute())
    stored = replace(collect(model), origin=origin)
    if classifier is not None:
        stored = replace(stored, whole=stored.whole | classifier.tensors(model))
    quantised = base is None and any(isinstance(module, NF4Linear) for module in model.modules())
    directory = Path(directory)
    clear_leftovers(directory.parent, of=directory.name)
    with new_directory(directory) as staging:
        if tokenizer is not None:
            save_tokenizer(tokenizer, staging)
        load_object(LAYOUTS[layout])(staging, model, stored)
        if classifier is not None:
            classifier.write(staging)
        if quantised:
            write_json(staging / QUANTISED, NF4_BASE)
        if base is None and model.source is not None and origin == hub_id(str(model.name)):
            write_json(staging / TRAINED_ON, {"name": model.name, "directory": str(model.source.absolute())})


def base_name(model: LanguageModel) -> str | None:
    """What other programs can open a base by: a path, its hub id, or else the directory it was read from."""
    if model.name is None or Path(model.name).exists():
        return model.name
    return hub_id(model.name) or (model.name if model.source is None else str(model.source.absolute()))


def load_adapter(model: LanguageModel, directory: str | Path) -> LanguageModel:
    """Attach the adapter in a directory of either layout; every tensor must fit this model."""
    directory = Path(directory)
    check_links(directory)
    if (directory / MLX_WEIGHTS).is_file():
        stored = load_object("whet.model_io.formats.mlx:read_mlx")(directory)
    else:
        stored = read_peft(directory, model)
    attach_stored(model, stored, directory=directory)
    return model
