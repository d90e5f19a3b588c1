"""LoRA on experts whose weights are one tensor [experts, out, in] or on routers: PEFT's target_parameters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from whet.adapters.adapter import Adapter, LoRASettings, StoredLayer, StoredModule
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.models.moe import Experts, Router
from whet.ops.grouped_experts import grouped_linear

_RANKS = 8


def expert_weights(model: LanguageModel) -> dict[str, nn.Parameter]:
    """The fused weights of experts, by name: what has three dimensions and is no convolution."""
    return {
        f"{path}.{leaf}": parameter
        for path, module in model.named_modules()
        if not isinstance(module, _ConvNd | Adapter | nn.ParameterDict)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }


def router_weights(model: LanguageModel) -> dict[str, nn.Parameter]:
    """The weights of routers, by name: to PEFT they are parameters, too, and not layers."""
    return {
        f"{path}.weight": module.get_parameter("weight")
        for path, module in model.named_modules()
        if isinstance(module, Router) and not path.endswith((".base", ".trained"))
    }


def fused_weights(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Both: all that is adapted as a parameter."""
    return {**expert_weights(model), **router_weights(model)}


def expert_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """Experts, inputs and outputs of a fused weight; some classes hold it the other way around.

    A router is like a single expert.
    """
    if isinstance(module, Router):
        return 1, module.in_features, module.out_features
    experts, rows, columns = module.get_parameter(name).shape
    turned = getattr(module, "is_transposed", False)
    return (experts, rows, columns) if turned else (experts, columns, rows)


class LoRAExperts(Adapter):
    """The module that holds the experts of a layer, and an update of its own for each expert; or a router.

    A is [experts * rank, in] and B [out, rank * experts], expert by expert in A and rank by rank in B, as in
    PEFT's files. Native experts add the product of their rows with A and B; those of other classes, which
    only take weights, get the sum of weight and update.
    """

    def __init__(self, base: nn.Module, settings: Mapping[str, LoRASettings]) -> None:
        super().__init__(base)
        self.settings = dict(settings)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name, each in settings.items():
            if each.variant not in ("lora", "rslora"):
                raise ConfigError(f"{name}: {each.variant} is for linear layers, not for fused experts")
            if each.dropout:
                raise ConfigError(
                    f"{name}: fused experts cannot have dropout, since their input is not to be had alone",
                    hint="set method.dropout to 0, or leave the experts out of method.targets",
                )
            experts, inputs, outputs = expert_shape(base, name)
            device = base.get_parameter(name).device
            self.lora_A[name] = nn.Parameter(torch.zeros(experts * each.rank, inputs, device=device))
            self.lora_B[name] = nn.Parameter(torch.zeros(outputs, each.rank * experts, device=device))
            nn.init.kaiming_uniform_(self.lora_A[name], a=math.sqrt(5))

    def forward(self, *inputs: Any, **named: Any) -> Any:  # Any: whatever the base takes and gives
        """The base with its updates, while this is enabled."""
        if not self.enabled:
            return self.base(*inputs, **named)
        if isinstance(self.base, Experts):
            return self.base(*inputs, **named, update=self._low_rank)
        return functional_call(self.base, self._updated(), inputs, named)

    def __getattr__(self, name: str) -> Any:  # Any: what the classes of transformers ask their experts for
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [experts, rank, in] and B [experts, out, rank]."""
        experts, inputs, outputs = expert_shape(self.base, name)
        rank = self.settings[name].rank
        a = self.lora_A[name].view(experts, rank, inputs)
        return a, self.lora_B[name].view(outputs, rank, experts).permute(2, 0, 1)

    def _low_rank(self, name: str, rows: torch.Tensor, ends: torch.Tensor | int) -> torch.Tensor | None:
        """What the update of a weight adds to the product of rows sorted by expert, or of one expert's."""
        if name not in self.settings:
            return None
        a, b = self._factors(name)
        if isinstance(ends, int):
            wide = torch.promote_types(rows.dtype, a.dtype)
            low = F.linear(rows.to(wide), a[ends].to(wide))
            return (F.linear(low, b[ends].to(low.dtype)) * self.settings[name].scale).to(rows.dtype)
        missing = -a.shape[1] % _RANKS  # zeros up to a rank that the grouped product takes
        low = grouped_linear(rows, F.pad(a, (0, 0, 0, missing)), ends)
        return grouped_linear(low, F.pad(b, (0, missing)), ends) * self.settings[name].scale

    def _updated(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, settings in self.settings.items():
            a, b = self._factors(name)
            update = torch.bmm(b.float(), a.float()) * settings.scale  # [experts, out, in]
            weight = self.base.get_parameter(name)
            update = update.transpose(1, 2) if getattr(self.base, "is_transposed", False) else update
            found[name] = weight + update.view_as(weight).to(weight.dtype)
        return found

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a plain module that computes the same."""
        return {**dict(self.base.named_parameters()), **self._updated()}

    def stored(self) -> StoredModule:
        """The adapter of each fused weight, for a file."""
        layers = {
            name: StoredLayer(
                settings, self.lora_A[name], self.lora_B[name], experts=expert_shape(self.base, name)[0]
            )
            for name, settings in self.settings.items()
        }
        return StoredModule(layers)
