"""Models as merging reads them: tensor by tensor, under Hugging Face's names, adapters folded in."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import Adapter, adapted
from whet.adapters.nf4 import NF4Linear
from whet.errors import ModelError
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.file_checks import check_weight
from whet.model_io.hub import resolve
from whet.model_io.load import load, load_quantised
from whet.model_io.merging.adapter_set import merged_parameters
from whet.model_io.resolve import base_of, config_of_checkpoint, usable_directory
from whet.model_io.safetensors import TensorFiles
from whet.models import families
from whet.models.language_model import LanguageModel


class ModelSource:
    """The tensors of a model directory."""

    base: str | None = None  # what it is an adapter of
    quantised = False  # whether that is in 4 bits

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.config = read_config(directory)
        self._files = TensorFiles(directory)
        family = families.choose(self.config).family
        ignored = {tensor for tensor in self._files if family and families.is_buffer(family, tensor)}
        if family and self.config.get("tie_word_embeddings"):
            ignored.add(family.hf_name("lm_head.weight"))  # some files hold the embedding a second time
        self.described = {
            tensor: self._files.described(tensor) for tensor in self._files if tensor not in ignored
        }

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""
        tensor = self._files.get(name)
        if tensor.is_floating_point():
            check_weight(tensor, name, self._files.file_of(name))
        return tensor

    def architecture(self) -> dict[str, Any]:  # Any: JSON values
        """What decides how the tensors are used: the whole description for whet's own families."""
        family = families.choose(self.config).family
        described = read_spec(family, self.config, self.directory).describe() if family else {}
        return {"model_type": self.config.get("model_type"), **described}


class AdapterSource(ModelSource):
    """The tensors of an adapter's base, with the update folded in, in float32, where there is one.

    The base is opened in the widest dtype of its files, which mostly leaves its weights mapped from the disk.
    """

    def __init__(self, name: str, base: str, model: LanguageModel | None = None) -> None:
        directory = _root_of(base)
        super().__init__(name, directory)
        self.base = base
        self._model = model or load(name, dtype=self._widest(), device="cpu")[0]
        self.quantised = any(isinstance(module, NF4Linear) for module in self._model.modules())
        self._layers: dict[str, tuple[Adapter | NF4Linear, str]] = {}
        self._tensors = self._model.state_dict()
        self._own = {
            stored: own for own, tensor in self._tensors.items() for stored in self._in_files(own, tensor)
        }
        self._merged: tuple[str, torch.Tensor] | None = None  # the last one: experts are asked for one by one
        for path, layer in changed_modules(self._model):
            for key, tensor in merged_parameters(layer).items():
                own = f"{path}.{key}"
                for stored in self._in_files(own, tensor):
                    if stored not in self.described:
                        raise ModelError(f"{name} adapts {stored}, which {directory} does not hold")
                    self._own[stored] = own
                self._layers[own] = (layer, key)

    def _widest(self) -> torch.dtype | None:
        floats = [tensor.dtype for tensor in self.described.values() if tensor.is_floating_point()]
        return reduce(torch.promote_types, floats) if floats else None

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""
        own = self._own.get(name)
        if own in self._layers:
            return self._in_files(own, self._folded(own))[name]
        if own is not None:  # not read from the files: the base may be an adapter's, too
            return self._in_files(own, self._tensors[own])[name]
        return super().get(name)

    def _folded(self, own: str) -> torch.Tensor:
        if self._merged is None or self._merged[0] != own:
            layer, key = self._layers[own]
            self._merged = own, merged_parameters(layer)[key]
        return self._merged[1]

    def _in_files(self, own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter as the base's files hold it: those of experts may be in one tensor all the same."""
        whole = self._model.hf_name(own)
        if whole in self.described:
            return {whole: self._model.as_stored(own, tensor)}
        return self._model.in_files(own, tensor)


def changed_modules(model: LanguageModel) -> Iterator[tuple[str, Adapter | NF4Linear]]:
    """What is not as in the base's files: adapters, and the quantised layers that have none."""
    yield from adapted(model)
    for path, module in model.named_modules():
        if isinstance(module, NF4Linear) and not path.endswith(".base"):
            yield path, module


def _root_of(name: str) -> Path:
    """The model directory at the bottom of adapters on adapters."""
    target = usable_directory(name)
    inner = base_of(target)
    return _model_directory(target) if inner is None else _root_of(inner)


def _model_directory(target: str | Path) -> Path:
    if config_of_checkpoint(target) is not None:
        raise ModelError(
            f"{target} is a checkpoint of a whole model, and merging reads model directories",
            hint=f"write one first: whet export {target} --to hf --out DIR",
        )
    return resolve(str(target))


def open_source(name: str) -> ModelSource:
    """A model by name or path, a run, or an adapter with its base."""
    target = usable_directory(name)
    base = base_of(target)
    return ModelSource(name, _model_directory(target)) if base is None else AdapterSource(name, base)


def open_quantised(name: str) -> ModelSource:
    """The weights that adapters of a base in 4 bits were trained on."""
    model = load_quantised(name, dtype=torch.float32, device=torch.device("cpu"))
    return AdapterSource(name, name, model)


def same_model(first: str, second: str) -> bool:
    """Whether two names lead to the same files."""
    paths = [usable_directory(name) for name in (first, second)]
    found = [path if base_of(path) else resolve(str(path)) for path in paths]
    return Path(found[0]).resolve() == Path(found[1]).resolve()


def check_alike(sources: list[ModelSource]) -> None:
    """Raise a ModelError that names the first few differences unless all hold the same architecture."""
    first = sources[0]
    for other in sources[1:]:
        found = [
            f"{key} is {ours} and {theirs}"
            for key, ours, theirs in _differences(first.architecture(), other.architecture())
        ]
        if not found:
            found = list(_tensor_differences(first, other))
        if found:
            more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
            raise ModelError(
                f"{first.name} and {other.name} are not the same kind of model: "
                + "; ".join(found[:4])
                + more,
                hint="only models of one architecture, with all sizes equal, can be merged",
            )


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two JSON values that differ, by path."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(ours, tuple | list) and isinstance(theirs, tuple | list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
        yield f"the number of {path}", len(ours), len(theirs)
    elif ours != theirs:
        yield path, ours, theirs


def _tensor_differences(first: ModelSource, other: ModelSource) -> Iterator[str]:
    for name in dict.fromkeys([*first.described, *other.described]):
        if name not in first.described or name not in other.described:
            absent = first if name not in first.described else other
            yield f"{absent.name} has no {name}"
        elif first.described[name].shape != other.described[name].shape:
            shapes = [list(source.described[name].shape) for source in (first, other)]
            yield f"{name} is {shapes[0]} and {shapes[1]}"
