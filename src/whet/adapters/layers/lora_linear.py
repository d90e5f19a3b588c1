"""A linear layer with a LoRA update, as in PEFT: y = x W' + scale * dropout(x) A' B'."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from whet.adapters.adapter import Adapter, LoRASettings, StoredLayer, StoredModule
from whet.adapters.fused_lora import Operands, PreparedLayers, fused_lora_outputs, fused_lora_swiglu
from whet.adapters.nf4 import NF4Linear
from whet.errors import ConfigError
from whet.ops.kernels import lora_swiglu


class LoRALinear(Adapter):
    """A frozen linear layer and its low-rank update, which is initialized to zero."""

    base: nn.Linear | NF4Linear

    def __init__(self, base: nn.Linear | NF4Linear, settings: LoRASettings) -> None:
        super().__init__(base)
        if settings.rank < 1:
            raise ConfigError(f"rank {settings.rank} is too small: an adapter needs a rank of at least 1")
        self.settings = settings
        self.scale = settings.scale
        # float32 for any dtype of the base, because rounding to bf16 would discard small updates
        device = base.codes.device if isinstance(base, NF4Linear) else base.weight.device
        zeros = partial(torch.zeros, device=device, dtype=torch.float32)
        self.lora_A = nn.Parameter(zeros(settings.rank, base.in_features))
        self.lora_B = nn.Parameter(zeros(base.out_features, settings.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the base layer, plus the update if it is enabled."""
        if not self.enabled:
            return self.base(x)
        if self.has_active_dropout:
            return self.forward_with_dropout(x, F.dropout(x, self.settings.dropout))
        if not self.paths.fused_lora:
            return self.forward_with_dropout(x, x)
        return self.finish_output(self._fused_outputs(x, [self])[0])

    def forward_siblings(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> list[torch.Tensor] | None:
        """Return the outputs of several layers for one input, or None if they cannot be fused."""
        fusible = _fusible_layers(layers)
        if not self.paths.fused_lora or len(fusible) != len(layers):
            return None
        outputs = self._fused_outputs(x, fusible)
        return [layer.finish_output(output) for layer, output in zip(fusible, outputs, strict=True)]

    def forward_swiglu(self, x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor | None:
        """Return down(silu(self(x)) * up(x)), or None if fusing is impossible or would not be faster."""
        layers = _fusible_layers((self, up, down))
        if (
            not self.paths.fused_lora
            or self._is_prepared
            or len(layers) != 3
            or any(type(layer).finish_output is not LoRALinear.finish_output for layer in layers)
        ):
            return None
        operands = [layer.operands() for layer in layers]
        ranks = tuple(len(layer_operands.a) for layer_operands in operands)
        dtype = self.base.dtype if isinstance(self.base, NF4Linear) else self.base.weight.dtype
        if not lora_swiglu.is_supported(x, dtype, ranks):
            return None
        return fused_lora_swiglu(x, *operands)

    def _fused_outputs(self, x: torch.Tensor, layers: Sequence["LoRALinear"]) -> Sequence[torch.Tensor]:
        if not self._is_prepared:
            return fused_lora_outputs(x, [layer.operands() for layer in layers])
        return self.cached(tuple(layers), lambda: PreparedLayers([layer.operands() for layer in layers]))(x)

    @property
    def _is_prepared(self) -> bool:
        """Whether values derived from weights alone are cached and reused."""
        return self.weight_cache is not None and not torch.is_grad_enabled()

    @property
    def has_active_dropout(self) -> bool:
        """Whether dropout is active, which makes the output random."""
        return self.training and self.settings.dropout > 0

    def operands(self) -> Operands:
        """Return the operands of this layer's matmuls."""
        base = self.base
        weight = base if isinstance(base, NF4Linear) else base.weight
        return Operands(weight, base.bias, self.lora_A, self.lora_B, self.scale)

    def finish_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, given the fused output for `operands`. Variants override this."""
        return output

    def forward_with_dropout(self, x: torch.Tensor, update_input: torch.Tensor) -> torch.Tensor:
        """Return the output, with `update_input` (x after dropout) as the input of the update."""
        operands = self.operands()
        if self.paths.fused_lora:
            return fused_lora_outputs(x, [operands], update_input)[0]
        wide = torch.promote_types(x.dtype, operands.a.dtype)
        low = F.linear(update_input.to(wide), operands.a.to(wide))
        y = self.base(x)
        return (y + operands.scale * F.linear(low, operands.b.to(low.dtype))).to(y.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in use, merged if the adapter is enabled. Some transformers models read it directly."""
        return self.merged_weight() if self.enabled else self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the base layer."""
        return self.base.bias

    @property
    def in_features(self) -> int:
        """Size of the last input dimension."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Size of the last output dimension."""
        return self.base.out_features

    def delta_weight(self) -> torch.Tensor:
        """Return scale * B A in float32."""
        operands = self.operands()
        return (operands.b.float() @ operands.a.float()) * operands.scale

    def merged_weight(self) -> torch.Tensor:
        """Return W + scale * B A, computed in float32 and cast to the dtype of the base."""
        weight = self.base.weight
        return (weight.float() + self.delta_weight()).to(weight.dtype)

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the weight and bias of a plain layer with the same outputs."""
        bias = {} if self.base.bias is None else {"bias": self.base.bias}
        return {"weight": self.merged_weight(), **bias}

    def stored(self) -> StoredModule:
        """Return the stored form of this layer's adapter."""
        return StoredModule.from_layer(self.stored_layer())

    def stored_layer(self) -> StoredLayer:
        """Return the low-rank update that adapter files store for this variant."""
        return StoredLayer(self.settings, self.lora_A, self.lora_B)


def _fusible_layers(layers: Sequence[nn.Module]) -> list[LoRALinear]:
    """Return the LoRA layers that are enabled and have no active dropout and no hooks."""
    return [
        layer
        for layer in layers
        if isinstance(layer, LoRALinear)
        and layer.enabled
        and not layer.has_active_dropout
        and not _has_hooks(layer)
    ]


def _has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has hooks, which run only if the layer itself is called."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks)
