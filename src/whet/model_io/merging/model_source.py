"""Read models for merging: tensor by tensor, with Hugging Face names, and with adapters merged."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import Adapter, named_adapters
from whet.adapters.nf4 import NF4Linear
from whet.errors import ModelError
from whet.model_io.base_models import base_model_of, config_of_checkpoint, local_model_directory
from whet.model_io.config_json import QUANTIZATION, read_config, read_spec
from whet.model_io.file_checks import check_weight
from whet.model_io.load import load, load_quantized
from whet.model_io.merging.adapter_set import merge_in_float32
from whet.model_io.resolve_model import resolve_model
from whet.model_io.safetensors import open_tensor_files
from whet.models import families
from whet.models.language_model import LanguageModel


class ModelSource:
    """The tensors of a model directory."""

    base: str | None = None  # the base model, if this is an adapter
    is_quantized = False  # whether the base is in 4 bits

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.config = read_config(directory)
        self._files = open_tensor_files(directory, self.config)
        self.config.pop(QUANTIZATION, None)  # the tensors are dequantized
        family = families.choose_family(self.config).family
        ignored = {tensor for tensor in self._files if family and families.is_buffer(family, tensor)}
        if family and self.config.get("tie_word_embeddings"):
            ignored.add(family.hf_name("lm_head.weight"))  # some files contain the embedding twice
        self.tensors = {  # on the meta device
            tensor: self._files.meta_tensor(tensor) for tensor in self._files if tensor not in ignored
        }

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, and raise ModelError if it is not a valid weight."""
        tensor = self._files.get(name)
        if tensor.is_floating_point():
            check_weight(tensor, name, self._files.file_of(name))
        return tensor

    def architecture(self) -> dict[str, Any]:  # Any: JSON values
        """Return the properties that must be equal: for native families, the entire model spec."""
        family = families.choose_family(self.config).family
        spec = read_spec(family, self.config, self.directory).describe() if family else {}
        return {"model_type": self.config.get("model_type"), **spec}


class AdapterSource(ModelSource):
    """The tensors of an adapter's base, with adapted tensors merged in float32.

    The base is loaded in the widest dtype of its files, so most of its weights stay memory-mapped.
    """

    def __init__(self, name: str, base: str, model: LanguageModel | None = None) -> None:
        directory = _base_directory(base)
        super().__init__(name, directory)
        self.base = base
        self._model = model or load(name, dtype=self._widest_dtype(), device="cpu")[0]
        self.is_quantized = any(isinstance(module, NF4Linear) for module in self._model.modules())
        self._changed: dict[str, tuple[Adapter | NF4Linear, str]] = {}  # by parameter: its layer and key
        self._state = self._model.state_dict()
        self._parameter_of = {  # by tensor name
            stored: parameter
            for parameter, tensor in self._state.items()
            for stored in self._to_stored(parameter, tensor)
        }
        # only the last one is cached, because the experts of a fused parameter are read one after the other
        self._last_merged: tuple[str, torch.Tensor] | None = None
        for path, layer in changed_modules(self._model):
            for key, tensor in merge_in_float32(layer).items():
                parameter = f"{path}.{key}"
                for stored in self._to_stored(parameter, tensor):
                    if stored not in self.tensors:
                        raise ModelError(f"{name} adapts {stored}, which {directory} does not contain")
                    self._parameter_of[stored] = parameter
                self._changed[parameter] = (layer, key)

    def _widest_dtype(self) -> torch.dtype | None:
        dtypes = [tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()]
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, merged if it is adapted or quantized."""
        parameter = self._parameter_of.get(name)
        if parameter in self._changed:
            return self._to_stored(parameter, self._merge(parameter))[name]
        if parameter is not None:  # not read from the files, because the base may itself be an adapter
            return self._to_stored(parameter, self._state[parameter])[name]
        return super().get(name)

    def _merge(self, parameter: str) -> torch.Tensor:
        if self._last_merged is None or self._last_merged[0] != parameter:
            layer, key = self._changed[parameter]
            self._last_merged = parameter, merge_in_float32(layer)[key]
        return self._last_merged[1]

    def _to_stored(self, parameter: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter as the tensors of the base's files, which may store experts fused or not."""
        hf_name = self._model.hf_name(parameter)
        if hf_name in self.tensors:
            return {hf_name: self._model.to_hf_layout(parameter, tensor)}
        return self._model.to_hf_tensors(parameter, tensor)


def changed_modules(model: LanguageModel) -> Iterator[tuple[str, Adapter | NF4Linear]]:
    """Yield the modules that differ from the base's files: adapters, and quantized layers without one."""
    yield from named_adapters(model)
    for path, module in model.named_modules():
        if isinstance(module, NF4Linear) and not path.endswith(".base"):
            yield path, module


def _base_directory(name: str) -> Path:
    """Return the directory of the innermost base model, which may be below several adapters."""
    target = local_model_directory(name)
    base = base_model_of(target)
    return _model_directory(target) if base is None else _base_directory(base)


def _model_directory(target: str | Path) -> Path:
    if config_of_checkpoint(target) is not None:
        raise ModelError(
            f"{target} is a checkpoint of a full model, but merging requires model directories",
            hint=f"export it first: whet export {target} --to hf --out DIR",
        )
    return resolve_model(str(target))


def open_source(name: str) -> ModelSource:
    """Open a model by name or path, a run, or an adapter with its base."""
    target = local_model_directory(name)
    base = base_model_of(target)
    return ModelSource(name, _model_directory(target)) if base is None else AdapterSource(name, base)


def open_quantized_source(name: str) -> ModelSource:
    """Open a base model with the dequantized 4-bit weights that its adapters were trained on."""
    model = load_quantized(name, dtype=torch.float32, device=torch.device("cpu"))
    return AdapterSource(name, name, model)


def is_same_model(first: str, second: str) -> bool:
    """Return whether two names refer to the same files."""
    targets = [local_model_directory(name) for name in (first, second)]
    paths = [target if base_model_of(target) else resolve_model(str(target)) for target in targets]
    return Path(paths[0]).resolve() == Path(paths[1]).resolve()


def check_same_architecture(sources: list[ModelSource]) -> None:
    """Raise a ModelError with the first few differences unless all models have the same architecture."""
    first = sources[0]
    for source in sources[1:]:
        differences = [
            f"{key} is {ours} and {theirs}"
            for key, ours, theirs in _differences(first.architecture(), source.architecture())
        ]
        if not differences:
            differences = list(_tensor_differences(first, source))
        if differences:
            more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise ModelError(
                f"{first.name} and {source.name} have different architectures: "
                + "; ".join(differences[:4])
                + more,
                hint="only models with the same architecture and the same sizes can be merged",
            )


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, ours, theirs) for each leaf in which two JSON values differ."""
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


def _tensor_differences(first: ModelSource, second: ModelSource) -> Iterator[str]:
    for name in dict.fromkeys([*first.tensors, *second.tensors]):
        if name not in first.tensors or name not in second.tensors:
            incomplete = first if name not in first.tensors else second
            yield f"{incomplete.name} has no {name}"
        elif first.tensors[name].shape != second.tensors[name].shape:
            shapes = [list(source.tensors[name].shape) for source in (first, second)]
            yield f"{name} is {shapes[0]} and {shapes[1]}"
