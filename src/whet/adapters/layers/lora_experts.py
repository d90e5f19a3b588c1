"""LoRA on routers and on experts with fused weights [experts, out, in]: PEFT's target_parameters."""

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

_RANK_MULTIPLE = 8  # the grouped matmul requires it


def expert_weights(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return the fused weights of experts by name: 3-D parameters outside of convolutions."""
    return {
        f"{path}.{leaf}": parameter
        for path, module in model.named_modules()
        if not isinstance(module, _ConvNd | Adapter | nn.ParameterDict)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }


def router_weights(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return the weights of routers by name. PEFT also treats them as parameters, not as layers."""
    return {
        f"{path}.weight": module.get_parameter("weight")
        for path, module in model.named_modules()
        if isinstance(module, Router) and not path.endswith((".base", ".trained"))
    }


def parameter_targets(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return all weights that are adapted as parameters: those of fused experts and of routers."""
    return {**expert_weights(model), **router_weights(model)}


def expert_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """Return (experts, inputs, outputs) of a fused weight, which some classes store transposed.

    A router counts as a single expert.
    """
    if isinstance(module, Router):
        return 1, module.in_features, module.out_features
    experts, rows, columns = module.get_parameter(name).shape
    is_transposed = getattr(module, "is_transposed", False)
    return (experts, rows, columns) if is_transposed else (experts, columns, rows)


class LoRAExperts(Adapter):
    """A module with fused experts and one update per expert, or a router and its update.

    A is [experts * rank, in], ordered by expert, and B is [out, rank * experts], ordered by rank, as in
    PEFT's files. whet's own experts add the low-rank product of their rows with A and B. Other classes only
    accept weights, so they compute with the sum of weight and update.
    """

    def __init__(self, base: nn.Module, settings: Mapping[str, LoRASettings]) -> None:
        super().__init__(base)
        self.settings = dict(settings)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name, weight_settings in settings.items():
            if weight_settings.variant not in ("lora", "rslora"):
                raise ConfigError(
                    f"{name}: {weight_settings.variant} supports linear layers, not fused experts or routers"
                )
            if weight_settings.dropout:
                raise ConfigError(
                    f"{name}: fused experts and routers cannot have dropout, because the update has no "
                    "separate input",
                    hint="set method.dropout to 0, or remove experts and routers from method.targets",
                )
            experts, inputs, outputs = expert_shape(base, name)
            rank, device = weight_settings.rank, base.get_parameter(name).device
            self.lora_A[name] = nn.Parameter(torch.zeros(experts * rank, inputs, device=device))
            self.lora_B[name] = nn.Parameter(torch.zeros(outputs, rank * experts, device=device))
            nn.init.kaiming_uniform_(self.lora_A[name], a=math.sqrt(5))

    def forward(self, *inputs: Any, **named: Any) -> Any:  # Any: the base's signature
        """Return the output of the base, with the updates if they are enabled."""
        if not self.enabled:
            return self.base(*inputs, **named)
        if isinstance(self.base, Experts):
            return self.base(*inputs, **named, update=self._low_rank)
        return functional_call(self.base, self._updated(), inputs, named)

    def __getattr__(self, name: str) -> Any:  # Any: attributes that transformers models read from experts
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [experts, rank, in] and B [experts, out, rank]."""
        experts, inputs, outputs = expert_shape(self.base, name)
        rank = self.settings[name].rank
        a = self.lora_A[name].view(experts, rank, inputs)
        return a, self.lora_B[name].view(outputs, rank, experts).permute(2, 0, 1)

    def _low_rank(self, name: str, rows: torch.Tensor, ends: torch.Tensor | int) -> torch.Tensor | None:
        """Return the update's contribution for `rows`, or None if the weight is not adapted.

        The rows are sorted by expert. `ends` has the end of each expert's rows, or is the index of the one
        expert that all rows belong to.
        """
        if name not in self.settings:
            return None
        a, b = self._factors(name)
        if isinstance(ends, int):
            wide = torch.promote_types(rows.dtype, a.dtype)
            low = F.linear(rows.to(wide), a[ends].to(wide))
            return (F.linear(low, b[ends].to(low.dtype)) * self.settings[name].scale).to(rows.dtype)
        padding = -a.shape[1] % _RANK_MULTIPLE
        low = grouped_linear(rows, F.pad(a, (0, 0, 0, padding)), ends)
        return grouped_linear(low, F.pad(b, (0, padding)), ends) * self.settings[name].scale

    def _updated(self) -> dict[str, torch.Tensor]:
        updated = {}
        for name, settings in self.settings.items():
            a, b = self._factors(name)
            update = torch.bmm(b.float(), a.float()) * settings.scale  # [experts, out, in]
            weight = self.base.get_parameter(name)
            update = update.transpose(1, 2) if getattr(self.base, "is_transposed", False) else update
            updated[name] = weight + update.view_as(weight).to(weight.dtype)
        return updated

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the parameters of a plain module with the same outputs."""
        return {**dict(self.base.named_parameters()), **self._updated()}

    def stored(self) -> StoredModule:
        """Return the stored form of the adapter, with one layer per adapted weight."""
        layers = {
            name: StoredLayer(
                settings, self.lora_A[name], self.lora_B[name], experts=expert_shape(self.base, name)[0]
            )
            for name, settings in self.settings.items()
        }
        return StoredModule(layers)
