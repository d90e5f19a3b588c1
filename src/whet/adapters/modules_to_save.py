"""Modules that are trained in full next to the adapters: PEFT's modules_to_save."""

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from whet.adapters.adapter import Adapter, StoredModule, replace_module
from whet.models.language_model import LanguageModel


class ModuleToSave(Adapter):
    """A frozen module and a trained copy of it in float32, the dtype of all trained parameters."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.trained = copy.deepcopy(base).float().requires_grad_(True)

    def forward(self, *inputs: Any, **named: Any) -> Any:  # Any: the base's signature
        """Compute with the trained parameters, in the dtype of the base."""
        if not self.enabled:
            return self.base(*inputs, **named)
        return functional_call(self.base, self.merged(), inputs, named)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in use. Losses read the weight of a head instead of calling the module."""
        return self.merged()["weight"] if self.enabled else self.base.get_parameter("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias in use, or None if the module has none."""
        source = self.merged() if self.enabled else dict(self.base.named_parameters())
        return source.get("bias")

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters in the dtype of the base."""
        trained = dict(self.trained.named_parameters())
        return {name: trained[name].to(p.dtype) for name, p in self.base.named_parameters()}

    def stored(self) -> StoredModule:
        """Return the trained parameters in the dtype they are trained in."""
        return StoredModule(parameters=dict(self.trained.named_parameters()))


def wrap_modules_to_save(model: LanguageModel, names: list[str]) -> None:
    """Wrap modules in ModuleToSave, in place. Parameters that are tied in the base stay tied."""
    trained_copies: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        base = model.get_submodule(name)
        wrapper = ModuleToSave(base)
        for key, parameter in base.named_parameters():
            trained = trained_copies.setdefault(parameter, wrapper.trained.get_parameter(key))
            path, _, leaf = key.rpartition(".")
            setattr(wrapper.trained.get_submodule(path), leaf, trained)
        replace_module(model, name, wrapper)
