"""Several adapters on one base model: switched, merged and unmerged."""

from collections.abc import Mapping
from pathlib import Path

import torch

from whet.adapters.adapter import Adapter, adapted, replace_module
from whet.adapters.nf4 import NF4Linear
from whet.errors import ConfigError, ModelError
from whet.model_io.formats.adapter_files import load_adapter
from whet.models.language_model import LanguageModel


class AdapterSet:
    """Several adapters on one base model: one in use at a time, or a weighted sum folded into the weights."""

    def __init__(self, model: LanguageModel) -> None:
        if any(True for _ in adapted(model)):
            raise ConfigError("the model has an adapter already", hint="start from its base")
        self.model = model
        self._adapters: dict[str, dict[str, Adapter]] = {}
        self._before: dict[str, torch.Tensor] = {}  # base weights, while a sum is folded in
        self._name = model.name

    @property
    def names(self) -> list[str]:
        """The adapters that can be used."""
        return list(self._adapters)

    def add(self, name: str, directory: str | Path) -> None:
        """Load an adapter of this base under a name, and use it."""
        if name in self._adapters:
            raise ConfigError(f"there is an adapter called {name!r} already")
        before = dict(adapted(self.model))
        self.use(None)
        try:
            load_adapter(self.model, directory)
        except BaseException:
            self._put_back(before)
            raise
        self._adapters[name] = dict(adapted(self.model))

    def use(self, name: str | None) -> None:
        """Switch to one adapter, or with None to the untouched base."""
        if self._before:
            raise ConfigError("adapters are folded into the weights", hint="call unmerge() first")
        chosen = {} if name is None else self._adapter(name)
        for path, layer in list(adapted(self.model)):
            replace_module(self.model, path, layer.base)
        self._put_back(chosen)

    def _put_back(self, adapters: Mapping[str, Adapter]) -> None:
        for path, layer in adapters.items():
            replace_module(self.model, path, layer)

    def merge(self, weights: Mapping[str, float]) -> None:
        """Fold base + sum_i w_i update_i into the weights, in the dtype of the base."""
        chosen = {name: self._adapter(name) for name in weights}
        if not chosen:
            raise ConfigError("no adapter was named to be merged", hint=f"known: {', '.join(self.names)}")
        self.use(None)
        sums: dict[str, torch.Tensor] = {}
        for name, layers in chosen.items():
            for path, layer in layers.items():
                for key, update in updates_of(layer).items():
                    sums[f"{path}.{key}"] = sums.get(f"{path}.{key}", 0.0) + update * weights[name]
        self._name, self.model.name = self.model.name, None  # nobody else has these weights
        tied = set()
        for path, update in sums.items():
            parameter = self.model.get_parameter(path)
            if id(parameter) in tied:  # changed already, by its other name
                continue
            tied.add(id(parameter))
            self._before[path] = parameter.data
            parameter.data = (parameter.data.float() + update).to(parameter.dtype)

    def unmerge(self) -> None:
        """The base weights again, bit for bit: they were kept, since subtracting would round."""
        for path, weight in self._before.items():
            self.model.get_parameter(path).data = weight
        if self._before:
            self.model.name = self._name
        self._before = {}

    def _adapter(self, name: str) -> dict[str, Adapter]:
        if name not in self._adapters:
            raise ConfigError(f"no adapter is called {name!r}", hint=f"known: {', '.join(self.names)}")
        return self._adapters[name]


def merged_parameters(layer: Adapter | NF4Linear) -> dict[str, torch.Tensor]:
    """What the parameters of a layer's base would be with the adapter folded in, whatever its variant.

    In float32: the base is widened for a moment, so that the sum is not rounded to its dtype.
    """
    plain = layer.base if isinstance(layer, Adapter) else layer
    narrow = {parameter: parameter.data for parameter in plain.parameters()}
    if isinstance(plain, NF4Linear):
        unpacked, plain.dtype = plain.dtype, torch.float32
    try:
        for parameter, values in narrow.items():
            parameter.data = values.float()
        with torch.no_grad():
            return layer.merged()
    finally:
        for parameter, values in narrow.items():
            parameter.data = values
        if isinstance(plain, NF4Linear):
            plain.dtype = unpacked


def updates_of(layer: Adapter) -> dict[str, torch.Tensor]:
    """What an adapter adds to the parameters of its base, in float32."""
    base = dict(layer.base.named_parameters())
    merged = merged_parameters(layer)
    if absent := merged.keys() - base.keys():
        raise ModelError(
            f"the base has no {min(absent)} to add an update to: it is quantised",
            hint="whet merge writes a model with the update on the dequantised base",
        )
    return {key: merged[key] - base[key].detach().float() for key in merged}
