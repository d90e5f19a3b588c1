"""Write a LoRA adapter as a GGUF adapter, which llama.cpp applies to the GGUF file of the base."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from whet.adapters.adapter import Adapter, StoredLayer, named_adapters
from whet.errors import ModelError
from whet.model_io.gguf.tensor_names import Slot, build_skeleton, tensor_slots
from whet.model_io.gguf.writer import Entry, describe_language_model, pack_file
from whet.models.language_model import LanguageModel
from whet.storage import create_file_atomically, remove_temporary_files, write_chunks


def write_gguf_adapter(path: str | Path, model: LanguageModel) -> None:
    """Write the model's adapter in float32, as one file that appears under its name when it is complete.

    Raises:
        ModelError: If GGUF cannot represent the model or the adapter.
    """
    path = Path(path)
    described = describe_language_model(model)
    slots = tensor_slots(build_skeleton(described.spec), described.architecture)
    slots_by_parameter = {slot.parameter: (name, slot) for name, slot in slots.items()}
    layers = dict(_stored_layers(model))
    # one alpha for all layers; a layer with another scale has the ratio in its B
    alpha = next(_equivalent_alpha(layer) for layer in layers.values())
    entries: dict[str, Entry] = {}
    for module, layer in layers.items():
        name, slot = slots_by_parameter[f"{module}.weight"]
        a, b = layer.a, layer.b * (_equivalent_alpha(layer) / alpha)
        entries[f"{name}.lora_a"] = _entry(Slot("", tuple(a.shape)), a)
        entries[f"{name}.lora_b"] = _entry(Slot("", tuple(b.shape), rotary_heads=slot.rotary_heads), b)
    metadata = {
        "general.architecture": described.architecture.name,
        "general.type": "adapter",
        "general.name": path.stem,
        "general.file_type": 0,  # all float32
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    remove_temporary_files(path.parent, only_name=path.name)
    with create_file_atomically(path) as staging:
        write_chunks(staging, pack_file(metadata, entries))


def _entry(slot: Slot, tensor: torch.Tensor) -> Entry:
    store: partial[NDArray[np.float32]] = partial(slot.store, tensor)
    return Entry(slot.shape, Kind.F32, store)


def _equivalent_alpha(layer: StoredLayer) -> float:
    """Return the alpha with which alpha / rank is the scale of the layer, also for rsLoRA."""
    return layer.settings.scale * layer.settings.rank


def _stored_layers(model: LanguageModel) -> Iterator[tuple[str, StoredLayer]]:
    """Yield the low-rank update of each module, or raise ModelError for other kinds of adapters."""
    is_empty = True
    for name, adapter in named_adapters(model):
        is_empty = False
        stored = adapter.stored()
        if stored.parameters:
            raise _unsupported(f"modules trained in full ({name})")
        for leaf, layer in stored.layers.items():
            if layer.magnitude is not None:
                raise _unsupported("DoRA")
            if layer.experts:
                raise _unsupported("adapters of fused experts")
            if layer.embedding:
                raise _unsupported("adapters of the embedding")
            yield f"{name}.{leaf}" if leaf else name, layer
    if is_empty:
        raise ModelError("the model has no adapter to export", hint="export the full model with --to gguf")


def _unsupported(feature: str) -> ModelError:
    return ModelError(
        f"GGUF adapters do not support {feature}", hint="export the merged model instead: --to gguf"
    )


def base_parameters(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the parameters of the base under their plain names, dequantized if they are quantized."""
    parameters = {}
    for name, _ in build_skeleton(describe_language_model(model).spec).named_parameters():
        path, _, leaf = name.rpartition(".")
        module: torch.nn.Module = model
        for part in path.split("."):
            module = getattr(module, part)
            while isinstance(module, Adapter):
                module = module.base
        parameters[name] = getattr(module, leaf)
    return parameters
