"""`whet.save`: write a model as a Hugging Face directory, with adapters merged and weights dequantized."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import Adapter, named_adapters
from whet.adapters.nf4 import NF4Linear
from whet.model_io.formats.classifier_head import StoredHead
from whet.model_io.safetensors import (
    MAX_SHARD_BYTES,
    write_model_directory,
)
from whet.models.language_model import LanguageModel


def save(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    directory: str | Path,
    *,
    classifier: StoredHead | None = None,
) -> None:
    """Write a Hugging Face model directory with adapters merged. The model itself stays unchanged.

    Args:
        model: The model to save.
        tokenizer: A transformers tokenizer to save with it, or None.
        directory: The directory to write. An existing non-empty directory is never overwritten.
        classifier: The head of a classifier, saved with the model.
    """
    plain = {name: module.merged() for name, module in named_adapters(model)}
    plain |= {name: layer.merged() for name, layer in _quantized_layers(model) if not name.endswith(".base")}
    save_model(
        model,
        tokenizer,
        directory,
        state=_plain_state(model, plain),
        extra_tensors=None if classifier is None else classifier.tensors(model),
        config=None if classifier is None else classifier.config(model, tokenizer),
        write_extra_files=None if classifier is None else classifier.write,
    )


def save_base(
    model: LanguageModel, tokenizer: Any, directory: str | Path
) -> None:  # Any: a transformers tokenizer
    """Write the base model that the adapters were trained on as a Hugging Face model directory."""
    plain: dict[str, Mapping[str, torch.Tensor]] = {
        name: dict(module.base.named_parameters()) for name, module in named_adapters(model)
    }
    plain |= {name.removesuffix(".base"): layer.merged() for name, layer in _quantized_layers(model)}
    save_model(model, tokenizer, directory, state=_plain_state(model, plain))


def _quantized_layers(model: LanguageModel) -> Iterator[tuple[str, NF4Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, NF4Linear))


def _plain_state(
    model: LanguageModel, plain: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the state dict of a model, with the parameters in `plain` for the modules named there."""
    prefixes = tuple(f"{name}." for name in plain)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)}
    for name, tensors in plain.items():
        module = model.get_submodule(name)
        buffers = _persistent_buffers(module.base if isinstance(module, Adapter) else module)
        state |= {f"{name}.{key}": tensor for key, tensor in {**buffers, **tensors}.items()}
    return state


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state that are neither parameters nor quantized weights."""
    if isinstance(module, NF4Linear):
        return {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def save_model(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    directory: str | Path,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,  # Any: JSON values
    write_extra_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads with equal logits.

    `extra_tensors`, `config` (additional config.json keys) and `write_extra_files`, which is called with the
    directory, add the parts of a classifier.
    """
    tensors = model.to_hf_state_dict(model.state_dict() if state is None else state) | dict(
        extra_tensors or {}
    )
    # names that share storage are tied, which config.json states, so the tensor is written once
    seen: dict[tuple[int, torch.Size], str] = {}
    unique = {
        name: tensor
        for name, tensor in tensors.items()
        if seen.setdefault((tensor.data_ptr(), tensor.shape), name) == name
    }
    dtype = str(next(iter(unique.values())).dtype).removeprefix("torch.")
    write_model_directory(
        Path(directory),
        unique,
        config={**model.hf_config(), "dtype": dtype, **(config or {})},
        source=model.source,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        write_extra_files=write_extra_files,
    )
