"""method.continue: read the settings of a trained adapter, and attach it to its base for more training."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import LoRASettings, named_adapters
from whet.adapters.attach import check_dropout
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.targets import select_layers, select_modules_to_save, values_per_layer
from whet.config.method import Method
from whet.config.objectives.classify import ClassifyObjective
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.model_io.base_models import base_model_of, config_of_checkpoint
from whet.model_io.formats.adapter_files import read_adapter_settings
from whet.model_io.load import (
    adapter_directory,
    attach_trained_adapter,
    check_not_classifier,
    is_base_quantized,
    load_base_of_adapter,
)
from whet.models.language_model import LanguageModel
from whet.run_directory import FINAL_DIRECTORY, PROVENANCE_FILE, run_directory_of
from whet.storage import file_sha256, read_json

_HINT = "remove the key: method.continue reads it from the adapter"


def resolve_continued(config: RunConfig) -> RunConfig:
    """Return the config with kind, rank, alpha, dropout and variant of the adapter that it continues.

    Configs without method.continue are returned unchanged.

    Raises:
        ConfigError: The model is not an adapter, or a key contradicts it.
    """
    method = config.method
    if not method.continues:
        return config
    name = str(config.language_model)
    stored = _stored_values(adapter_directory(name))
    for key in ("kind", "rank", "alpha", "variant"):
        requested = getattr(method, key)
        if key in method.model_fields_set and not _is_equal(requested, stored[key]):
            raise ConfigError(
                f"method.{key} is {_format(requested)}, but the adapter {name} has {_format(stored[key])}",
                hint=_HINT,
            )
    if "dropout" in method.model_fields_set:  # a setting of the training, not of the adapter
        stored["dropout"] = method.dropout
    return config.model_copy(update={"method": method.model_copy(update=stored)})


def _stored_values(target: Path) -> dict[str, Any]:  # Any: values of config keys
    """Return the keys of the method section that an adapter directory or checkpoint decides."""
    config = config_of_checkpoint(target)
    source: LoRASettings | Method = read_adapter_settings(target) if config is None else config.method
    kind = "qlora" if is_base_quantized(target) else "lora"
    return {"kind": kind, **{key: getattr(source, key) for key in ("rank", "alpha", "dropout", "variant")}}


def _is_equal(requested: object, stored: object) -> bool:
    if isinstance(requested, float) and isinstance(stored, float):
        return math.isclose(requested, stored)  # mlx-lm stores alpha / rank
    return requested == stored


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_continued(config: RunConfig, *, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Load the base model with the adapter that the run continues to train.

    Args:
        config: The config of the run, after `resolve_continued`.
        dtype: The dtype of the base weights. Adapters are in float32.
        device: The device.
    """
    name = str(config.language_model)
    if not isinstance(config.objective, ClassifyObjective):
        check_not_classifier(name)
    model = load_base_of_adapter(adapter_directory(name), dtype=dtype, device=device)
    attach_continued(model, config)
    return model


def attach_continued(model: LanguageModel, config: RunConfig) -> None:
    """Attach the adapter that the run continues to train to its base model, which may have no values.

    Raises:
        ConfigError: A key of the method section contradicts the adapter.
    """
    method, name = config.method, str(config.language_model)
    requested = _Requested(model, method)
    attach_trained_adapter(model, adapter_directory(name))
    for problem in requested.problems(model):
        raise ConfigError(f"{problem} in the adapter {name}", hint=_HINT)
    for path, module in named_adapters(model):
        if isinstance(module, LoRALinear):
            check_dropout(model, path, method.dropout)
            module.settings = replace(module.settings, dropout=method.dropout)


class _Requested:
    """The layers that the keys of a config select in a base model, to compare with a trained adapter."""

    def __init__(self, model: LanguageModel, method: Method) -> None:
        self.method = method
        self.keys = method.model_fields_set
        modules = {id(module): name for name, module in model.named_modules()}
        self.blocks = [f"{modules[id(block)]}." for block in model.blocks()]
        self.layers = select_layers(model, method.targets, None) if "targets" in self.keys else []
        self.modules_to_save = select_modules_to_save(model, method.modules_to_save)

    def problems(self, model: LanguageModel) -> Iterator[str]:
        """Yield how the keys contradict the adapters that the model has now."""
        settings = dict(_layer_settings(model))
        adapted = [index for index, block in enumerate(self.blocks) if _is_in(settings, block)]
        if "targets" in self.keys:
            skipped = tuple(block for index, block in enumerate(self.blocks) if index not in adapted)
            layers = {layer for layer in self.layers if not layer.startswith(skipped)}
            if layers != settings.keys():
                yield (
                    f"method.targets is {self.method.targets} ({_leaves(layers)}), "
                    f"but it is {_leaves(settings)}"
                )
        if "layers" in self.keys and (indices := self._block_indices()) != adapted:
            yield f"method.layers is {self.method.layers} (indices {indices}), but it is {adapted}"
        for key, attribute in (("rank_pattern", "rank"), ("alpha_pattern", "alpha")):
            if key in self.keys:
                patterns, default = getattr(self.method, key), getattr(self.method, attribute)
                for layer, value in values_per_layer(model, settings, patterns, default).items():
                    if not _is_equal(value, stored := getattr(settings[layer], attribute)):
                        yield (f"method.{key} gives {layer} {_format(value)}, but it has {_format(stored)}")
        saved = [name for name, module in named_adapters(model) if not hasattr(module, "settings")]
        if "modules_to_save" in self.keys and set(saved) != set(self.modules_to_save):
            yield f"method.modules_to_save is {self.modules_to_save}, but it is {saved}"

    def _block_indices(self) -> list[int]:
        layers, count = self.method.layers, len(self.blocks)
        if isinstance(layers, int):
            return list(range(max(0, count - layers), count))
        return list(range(count)) if layers is None else sorted(layers)


def _layer_settings(model: LanguageModel) -> Iterator[tuple[str, LoRASettings]]:
    """Yield the settings of each adapted layer; experts and routers have one entry per weight."""
    for name, module in named_adapters(model):
        settings = getattr(module, "settings", {})  # a module that is trained in full has none
        if isinstance(settings, LoRASettings):
            yield name, settings
        else:
            yield from ((f"{name}.{leaf}", value) for leaf, value in settings.items())


def _is_in(names: dict[str, LoRASettings], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _leaves(names: set[str] | dict[str, LoRASettings]) -> str:
    return f"{', '.join(sorted({name.rpartition('.')[2] for name in names}))}, {len(names)} layers"


def continued_chain(config: RunConfig) -> list[dict[str, Any]]:  # Any: JSON values
    """Return the adapters that the run continues, the latest first, with hashes of their weights."""
    if not config.method.continues:
        return []
    target = adapter_directory(str(config.language_model))
    digests = {file.name: file_sha256(file) for file in sorted(target.glob("*.safetensors"))}
    entry = {"adapter": str(target.absolute()), "base": base_model_of(target), "sha256": digests}
    is_checkpoint = config_of_checkpoint(target) is not None
    run = run_directory_of(target) if is_checkpoint else target.absolute().parent
    provenance = run / PROVENANCE_FILE
    if not (is_checkpoint or target.name == FINAL_DIRECTORY) or not provenance.is_file():
        return [entry]
    earlier = read_json(provenance).get("continues", [])
    return [entry, *(earlier if isinstance(earlier, list) else [])]
