"""What all adapters have in common."""

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from whet.ops.dispatch import chosen_paths

Made = TypeVar("Made")


class Adapter(nn.Module, abc.ABC):
    """A module in the place of one that it changes, which it keeps as `base`."""

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
    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a plain module that computes the same."""

    @abc.abstractmethod
    def folded(self) -> nn.Module:
        """That plain module: the base, changed."""


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
