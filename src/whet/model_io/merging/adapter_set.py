"""Switch between several adapters on one base model, and merge and unmerge them."""

from collections.abc import Mapping
from pathlib import Path

import torch

from whet.adapters.adapter import Adapter, named_adapters, replace_module
from whet.adapters.nf4 import NF4Linear
from whet.errors import ConfigError, ModelError
from whet.model_io.formats.adapter_files import load_adapter
from whet.models.language_model import LanguageModel


class AdapterSet:
    """Several adapters on one base model: one active at a time, or a weighted sum merged into the weights.

    Args:
        model: The base model, without adapters. It is changed in place.

    Raises:
        ConfigError: If the model already has an adapter.
    """

    def __init__(self, model: LanguageModel) -> None:
        if any(True for _ in named_adapters(model)):
            raise ConfigError("the model already has an adapter", hint="start from its base model")
        self.model = model
        self._adapters: dict[str, dict[str, Adapter]] = {}
        self._base_weights: dict[str, torch.Tensor] = {}  # of the changed parameters, while merged
        self._name = model.name

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters."""
        return list(self._adapters)

    def add(self, name: str, directory: str | Path) -> None:
        """Load an adapter of this base model and activate it.

        Args:
            name: The name under which to use it.
            directory: The adapter directory, in the PEFT or mlx-lm layout.

        Raises:
            ConfigError: If the name is in use, or adapters are merged into the weights.
            ModelError: If the adapter does not match the base model.
        """
        if name in self._adapters:
            raise ConfigError(f"there is already an adapter called {name!r}")
        before = dict(named_adapters(self.model))
        self.use(None)
        try:
            load_adapter(self.model, directory)
        except BaseException:
            self._insert(before)
            raise
        self._adapters[name] = dict(named_adapters(self.model))

    def use(self, name: str | None) -> None:
        """Switch to one adapter, or to the base model if the name is None."""
        if self._base_weights:
            raise ConfigError("adapters are merged into the weights", hint="call unmerge() first")
        selected = {} if name is None else self._adapter(name)
        for path, layer in list(named_adapters(self.model)):
            replace_module(self.model, path, layer.base)
        self._insert(selected)

    def _insert(self, adapters: Mapping[str, Adapter]) -> None:
        for path, layer in adapters.items():
            replace_module(self.model, path, layer)

    def merge(self, weights: Mapping[str, float]) -> None:
        """Merge base + sum_i w_i update_i into the weights, in the dtype of the base.

        Args:
            weights: The weight of each adapter, by name.
        """
        selected = {name: self._adapter(name) for name in weights}
        if not selected:
            raise ConfigError(
                "no adapters to merge: the weights are empty", hint=f"use some of {', '.join(self.names)}"
            )
        self.use(None)
        sums: dict[str, torch.Tensor] = {}
        for name, layers in selected.items():
            for path, layer in layers.items():
                for key, update in updates_of(layer).items():
                    sums[f"{path}.{key}"] = sums.get(f"{path}.{key}", 0.0) + update * weights[name]
        self._name, self.model.name = self.model.name, None  # the merged weights exist nowhere else
        updated = set()
        for path, update in sums.items():
            parameter = self.model.get_parameter(path)
            if id(parameter) in updated:  # a tied parameter, already changed under its other name
                continue
            updated.add(id(parameter))
            self._base_weights[path] = parameter.data
            parameter.data = (parameter.data.float() + update).to(parameter.dtype)

    def unmerge(self) -> None:
        """Restore the base weights bit for bit. They were stored, because subtracting would round."""
        for path, weight in self._base_weights.items():
            self.model.get_parameter(path).data = weight
        if self._base_weights:
            self.model.name = self._name
        self._base_weights = {}

    def _adapter(self, name: str) -> dict[str, Adapter]:
        if name not in self._adapters:
            raise ConfigError(f"no adapter is called {name!r}", hint=f"use one of {', '.join(self.names)}")
        return self._adapters[name]


def merge_in_float32(layer: Adapter | NF4Linear) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer with its adapter merged, in float32, for any variant.

    The base is temporarily converted to float32, so that the sum is not rounded to its dtype.
    """
    base = layer.base if isinstance(layer, Adapter) else layer
    original = {parameter: parameter.data for parameter in base.parameters()}
    if isinstance(base, NF4Linear):
        compute_dtype, base.dtype = base.dtype, torch.float32
    try:
        for parameter, values in original.items():
            parameter.data = values.float()
        with torch.no_grad():
            return layer.merged()
    finally:
        for parameter, values in original.items():
            parameter.data = values
        if isinstance(base, NF4Linear):
            base.dtype = compute_dtype


def updates_of(layer: Adapter) -> dict[str, torch.Tensor]:
    """Return the updates that an adapter adds to the parameters of its base, in float32."""
    base = dict(layer.base.named_parameters())
    merged = merge_in_float32(layer)
    if missing := merged.keys() - base.keys():
        raise ModelError(
            f"the base has no {min(missing)} to add an update to, because it is quantized",
            hint="write a model with the update merged into the dequantized base: whet merge",
        )
    return {key: merged[key] - base[key].detach().float() for key in merged}
