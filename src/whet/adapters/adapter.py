"""What all adapters have in common."""

import abc
import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class Adapter(nn.Module, abc.ABC):
    """A module in the place of one that it changes, which it keeps as `base`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.enabled = True

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


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where another one is."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
