"""Modules that are trained whole beside the adapters: PEFT's modules_to_save."""

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from whet.adapters.adapter import Adapter, StoredModule, replace_module
from whet.models.language_model import LanguageModel


class ModuleToSave(Adapter):
    """A module and the copy of it that is trained, in float32 as all that is trained."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.trained = copy.deepcopy(base).float().requires_grad_(True)

    def forward(self, *inputs: Any, **named: Any) -> Any:  # Any: whatever the base takes and gives
        """The copy computes in the dtype of the base."""
        if not self.enabled:
            return self.base(*inputs, **named)
        return functional_call(self.base, self.merged(), inputs, named)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the model computes with it: heads are read, not called."""
        return self.merged()["weight"] if self.enabled else self.base.get_parameter("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, where there is one."""
        source = self.merged() if self.enabled else dict(self.base.named_parameters())
        return source.get("bias")

    def merged(self) -> dict[str, torch.Tensor]:
        """The trained parameters in the dtype of the base."""
        trained = dict(self.trained.named_parameters())
        return {name: trained[name].to(p.dtype) for name, p in self.base.named_parameters()}

    def stored(self) -> StoredModule:
        """The trained parameters in their own dtype."""
        return StoredModule(parameters=dict(self.trained.named_parameters()))


def retrain(model: LanguageModel, names: list[str]) -> None:
    """Train modules whole, in place; parameters that are tied in the base stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        base = model.get_submodule(name)
        wrapper = ModuleToSave(base)
        for key, parameter in base.named_parameters():
            trained = made.setdefault(parameter, wrapper.trained.get_parameter(key))
            path, _, leaf = key.rpartition(".")
            setattr(wrapper.trained.get_submodule(path), leaf, trained)
        replace_module(model, name, wrapper)
