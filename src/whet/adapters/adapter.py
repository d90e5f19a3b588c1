"""What all adapters have in common, and the two forms in which files hold one."""

import abc
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from whet.adapters.nf4 import NF4Linear
from whet.ops.dispatch import chosen_paths

Made = TypeVar("Made")


@dataclass(frozen=True)
class LoRASettings:
    """What the adapter of one layer is, apart from its weights."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    variant: str = "lora"

    @property
    def scale(self) -> float:
        """What the update is multiplied by; rsLoRA's (arXiv 2312.03732) does not shrink with the rank."""
        return self.alpha / (math.sqrt(self.rank) if self.variant == "rslora" else self.rank)

    def checked(self) -> Self:
        """Return settings out of a file, or a ValueError where no layer can be computed with them."""
        if self.rank < 1:
            raise ValueError(f"the rank is {self.rank}, and must be at least 1")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha is {self.alpha}, and must be a finite number")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"the dropout is {self.dropout}, and must be from 0 to 1")
        return self


class StoredLayer(NamedTuple):
    """One layer's adapter as files hold it."""

    settings: LoRASettings
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    magnitude: torch.Tensor | None = None  # [out]: DoRA's lengths
    embedding: bool = False  # of an embedding, whose input says which row
    experts: int = 0  # of a fused weight: A and B of so many experts, as in LoRAExperts


@dataclass(frozen=True)
class StoredModule:
    """What a file holds of one adapter; names are relative to the module that it adapts."""

    layers: dict[str, StoredLayer] = field(default_factory=dict)  # by weight; "" is the module itself
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # trained in full

    @classmethod
    def of_layer(cls, layer: StoredLayer) -> Self:
        """An adapter that is one update, of the module itself."""
        return cls({"": layer})


class Adapter(nn.Module, abc.ABC):
    """A module in the place of one that it changes, which it keeps as `base`.

    `stored` and `merged` are all that saving, merging and exporting need to know of a kind of adapter.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.enabled = True
        self.paths = chosen_paths()
        self.lasting: dict[object, Any] | None = None  # within `unchanging`: what was made of weights alone

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` gives, made the first time only within `unchanging`."""
        if self.lasting is None:
            return make()
        if key not in self.lasting:
            self.lasting[key] = make()
        made: Made = self.lasting[key]
        return made

    @abc.abstractmethod
    def stored(self) -> StoredModule:
        """Return what a file holds of this adapter, in a form that the layouts know."""

    @abc.abstractmethod
    def merged(self) -> dict[str, torch.Tensor]:
        """Return the parameters of a plain module that computes the same; the base stays as it is."""

    def folded(self) -> nn.Module:
        """Return that plain module: the base with these parameters, dequantised if it was quantised."""
        merged = self.merged()
        base = self.base.to_linear() if isinstance(self.base, NF4Linear) else self.base
        for name, tensor in merged.items():
            parameter = base.get_parameter(name)
            if tensor is not parameter:
                parameter.data.copy_(tensor)
        return base


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """The adapters of a model, by the names of the modules they stand for."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The untouched base, for the time of a `with` block."""
    modules = [module for _, module in adapted(model)]
    before = [module.enabled for module in modules]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled


@contextlib.contextmanager
def unchanging(model: nn.Module) -> Iterator[None]:
    """No weight changes in a `with` block: what depends on weights alone is made once."""
    # what ranks hold in parts is gathered anew for each pass
    modules = [] if hasattr(model, "unshard") else [each for _, each in adapted(model) if each.paths.decoding]
    before = [module.lasting for module in modules]
    for module in modules:
        module.lasting = {} if module.lasting is None else module.lasting
    try:
        yield
    finally:
        for module, lasting in zip(modules, before, strict=True):
            module.lasting = lasting


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where another one is."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
