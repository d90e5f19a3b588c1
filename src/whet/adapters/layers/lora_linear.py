"""A linear layer with a low-rank update, PEFT's math: y = x W' + scale * dropout(x) A' B'."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from whet.adapters.adapter import Adapter, LoRASettings, StoredLayer, StoredModule
from whet.adapters.fused_lora import Operands, Settled, low_rank_gated, low_rank_products
from whet.adapters.nf4 import NF4Linear
from whet.errors import ConfigError
from whet.ops.kernels import lora_swiglu


class LoRALinear(Adapter):
    """A frozen linear layer and its low-rank update, which starts at zero."""

    base: nn.Linear | NF4Linear

    def __init__(self, base: nn.Linear | NF4Linear, settings: LoRASettings) -> None:
        super().__init__(base)
        if settings.rank < 1:
            raise ConfigError(f"rank {settings.rank}: an adapter needs a rank of at least 1")
        self.settings = settings
        self.scale = settings.scale
        # float32 whatever the base: small updates to bf16 weights would round away
        device = base.codes.device if isinstance(base, NF4Linear) else base.weight.device
        like = partial(torch.zeros, device=device, dtype=torch.float32)
        self.lora_A = nn.Parameter(like(settings.rank, base.in_features))
        self.lora_B = nn.Parameter(like(base.out_features, settings.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base layer, plus the update while it is enabled."""
        if not self.enabled:
            return self.base(x)
        if self.drops:
            return self.with_dropout(x, F.dropout(x, self.settings.dropout))
        if not self.paths.fused_lora:
            return self.with_dropout(x, x)
        return self.finished(self._products(x, [self])[0])

    def together(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> list[torch.Tensor] | None:
        """The outputs of several layers on one input, if all of them are like this one."""
        alike = _alike(layers)
        if not self.paths.fused_lora or len(alike) != len(layers):
            return None
        products = self._products(x, alike)
        return [layer.finished(product) for layer, product in zip(alike, products, strict=True)]

    def gated(self, x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor | None:
        """down(silu(self(x)) * up(x)) at once, if these are alike and it is worth it."""
        layers = _alike((self, up, down))
        if (
            not self.paths.fused_lora
            or self._is_settled
            or len(layers) != 3
            or any(type(layer).finished is not LoRALinear.finished for layer in layers)
        ):
            return None
        operands = [layer.operands() for layer in layers]
        ranks = tuple(len(each.a) for each in operands)
        dtype = self.base.dtype if isinstance(self.base, NF4Linear) else self.base.weight.dtype
        if not lora_swiglu.suits(x, dtype, ranks):
            return None
        return low_rank_gated(x, *operands)

    def _products(self, x: torch.Tensor, layers: Sequence["LoRALinear"]) -> Sequence[torch.Tensor]:
        if not self._is_settled:
            return low_rank_products(x, [layer.operands() for layer in layers])
        return self.once(tuple(layers), lambda: Settled([layer.operands() for layer in layers]))(x)

    @property
    def _is_settled(self) -> bool:
        """Whether what depends on weights alone is made once."""
        return self.lasting is not None and not torch.is_grad_enabled()

    @property
    def drops(self) -> bool:
        """Whether what it computes is random now."""
        return self.training and self.settings.dropout > 0

    def operands(self) -> Operands:
        """What the product of this layer is made of."""
        base = self.base
        weight = base if isinstance(base, NF4Linear) else base.weight
        return Operands(weight, base.bias, self.lora_A, self.lora_B, self.scale)

    def finished(self, product: torch.Tensor) -> torch.Tensor:
        """What a variant makes of the product."""
        return product

    def with_dropout(self, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """The base reads the input, the update what dropout left of it."""
        operands = self.operands()
        if self.paths.fused_lora:
            return low_rank_products(x, [operands], dropped)[0]
        wide = torch.promote_types(x.dtype, operands.a.dtype)
        low = F.linear(dropped.to(wide), operands.a.to(wide))
        y = self.base(x)
        return (y + operands.scale * F.linear(low, operands.b.to(low.dtype))).to(y.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the model computes with it; some classes of transformers read it directly."""
        return self.merged_weight() if self.enabled else self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the base layer."""
        return self.base.bias

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.base.out_features

    def delta(self) -> torch.Tensor:
        """scale * B A, in float32."""
        operands = self.operands()
        return (operands.b.float() @ operands.a.float()) * operands.scale

    def merged_weight(self) -> torch.Tensor:
        """W + scale * B A, computed in float32, in the dtype of the base."""
        weight = self.base.weight
        return (weight.float() + self.delta()).to(weight.dtype)

    def merged(self) -> dict[str, torch.Tensor]:
        """Weight and bias of a plain layer that computes the same."""
        bias = {} if self.base.bias is None else {"bias": self.base.bias}
        return {"weight": self.merged_weight(), **bias}

    def stored(self) -> StoredModule:
        """This layer's adapter, for a file."""
        return StoredModule.of_layer(self.stored_layer())

    def stored_layer(self) -> StoredLayer:
        """The low-rank update that a variant is stored as."""
        return StoredLayer(self.settings, self.lora_A, self.lora_B)


def _alike(layers: Sequence[nn.Module]) -> list[LoRALinear]:
    """Those that have an update, without chance, that can be computed together with others."""
    return [
        layer
        for layer in layers
        if isinstance(layer, LoRALinear) and layer.enabled and not layer.drops and not _is_watched(layer)
    ]


def _is_watched(layer: nn.Module) -> bool:
    """Whether it has hooks, which want it called."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks)
