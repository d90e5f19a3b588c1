"""The base class of all adapters, and the in-memory form of adapter files."""

import abc
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from whet.adapters.nf4 import NF4Linear
from whet.ops.dispatch import current_paths

T = TypeVar("T")


@dataclass(frozen=True)
class LoRASettings:
    """Hyperparameters of one layer's adapter."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    variant: str = "lora"

    @property
    def scale(self) -> float:
        """The factor of the update: alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.variant == "rslora" else self.rank)

    def validated(self) -> Self:
        """Return these settings, or raise ValueError if they are invalid."""
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, but must be at least 1")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha is {self.alpha}, but must be finite")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout is {self.dropout}, but must be between 0 and 1")
        return self


class StoredLayer(NamedTuple):
    """The adapter of one weight as adapter files store it."""

    settings: LoRASettings
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    magnitude: torch.Tensor | None = None  # [out]: DoRA's magnitude vector
    embedding: bool = False  # whether the adapted module is an embedding
    experts: int = 0  # for a fused weight: the number of experts that A and B cover, as in LoRAExperts


@dataclass(frozen=True)
class StoredModule:
    """The stored form of one adapter. Names are relative to the adapted module."""

    layers: dict[str, StoredLayer] = field(default_factory=dict)  # by weight name; "" is the module itself
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters trained in full

    @classmethod
    def from_layer(cls, layer: StoredLayer) -> Self:
        """Return the stored form of an adapter that is a single update of the module itself."""
        return cls({"": layer})


class Adapter(nn.Module, abc.ABC):
    """A module that replaces a module of the model and stores the original as `base`.

    Saving, merging and exporting rely only on `stored` and `merged`. A new kind of adapter implements both.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.enabled = True
        self.paths = current_paths()
        # values derived from weights alone; a dict within `constant_weights`, otherwise None
        self.weight_cache: dict[object, Any] | None = None

    def cached(self, key: object, compute: Callable[[], T]) -> T:
        """Return `compute()`. Within `constant_weights`, compute it once per key and reuse the result."""
        if self.weight_cache is None:
            return compute()
        if key not in self.weight_cache:
            self.weight_cache[key] = compute()
        value: T = self.weight_cache[key]
        return value

    @abc.abstractmethod
    def stored(self) -> StoredModule:
        """Return the stored form of this adapter, from which every file layout is written."""

    @abc.abstractmethod
    def merged(self) -> dict[str, torch.Tensor]:
        """Return the parameters of a plain module with the same outputs. The base is left unchanged."""

    def merged_module(self) -> nn.Module:
        """Return the base module with the merged parameters, dequantized if it was quantized."""
        merged = self.merged()
        base = self.base.to_linear() if isinstance(self.base, NF4Linear) else self.base
        for name, tensor in merged.items():
            parameter = base.get_parameter(name)
            if tensor is not parameter:
                parameter.data.copy_(tensor)
        return base


def named_adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name, adapter) for every adapter of a model. The name is that of the adapted module."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters of a model inside a `with` block, so that it computes as its base model."""
    modules = [module for _, module in named_adapters(model)]
    before = [module.enabled for module in modules]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled


@contextlib.contextmanager
def constant_weights(model: nn.Module) -> Iterator[None]:
    """Let adapters cache values derived from weights alone, inside a `with` block.

    No weight may change inside the block.
    """
    # a sharded model gathers its parameters in each forward pass, so nothing can be cached
    is_sharded = hasattr(model, "unshard")
    modules = (
        [] if is_sharded else [adapter for _, adapter in named_adapters(model) if adapter.paths.decoding]
    )
    before = [module.weight_cache for module in modules]
    for module in modules:
        module.weight_cache = {} if module.weight_cache is None else module.weight_cache
    try:
        yield
    finally:
        for module, cache in zip(modules, before, strict=True):
            module.weight_cache = cache


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule called `name` by `module`."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
