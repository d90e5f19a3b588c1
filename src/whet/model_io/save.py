"""`whet.save`: write a model, quantised or not, as a Hugging Face directory."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import Adapter, adapted
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
    """Write a Hugging Face model directory; adapters are written merged, the model itself stays as it is.

    The head of a classifier goes with it.
    """
    plain = {name: module.merged() for name, module in adapted(model)}
    plain |= {name: layer.merged() for name, layer in _quantised(model) if not name.endswith(".base")}
    save_model(
        model,
        tokenizer,
        directory,
        state=_state(model, plain),
        more=None if classifier is None else classifier.tensors(model),
        config=None if classifier is None else classifier.config(model, tokenizer),
        beside=None if classifier is None else classifier.write,
    )


def save_base(
    model: LanguageModel, tokenizer: Any, directory: str | Path
) -> None:  # Any: a transformers tokenizer
    """Write what a model's adapters were trained on, as a Hugging Face model directory."""
    plain: dict[str, Mapping[str, torch.Tensor]] = {
        name: dict(module.base.named_parameters()) for name, module in adapted(model)
    }
    plain |= {name.removesuffix(".base"): layer.merged() for name, layer in _quantised(model)}
    save_model(model, tokenizer, directory, state=_state(model, plain))


def _quantised(model: LanguageModel) -> Iterator[tuple[str, NF4Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, NF4Linear))


def _state(model: LanguageModel, plain: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters of a model, with other ones for some of its modules."""
    inner = tuple(f"{name}." for name in plain)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inner)}
    for name, tensors in plain.items():
        module = model.get_submodule(name)
        held = _buffers(module.base if isinstance(module, Adapter) else module)
        state |= {f"{name}.{key}": tensor for key, tensor in {**held, **tensors}.items()}
    return state


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a module's state holds beside its parameters, apart from codes that stand for these."""
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
    more: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,  # Any: JSON values
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads with equal logits.

    `more` tensors, other keys of the `config`, and files that are written `beside` belong to what is more
    than a language model.
    """
    tensors = model.state_in_files(model.state_dict() if state is None else state) | dict(more or {})
    # two names on one storage are one tensor: the config says that they are tied
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
        beside=beside,
    )
