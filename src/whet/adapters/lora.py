"""Low-rank adapters with PEFT's math: y = x W' + (alpha / rank) * dropout(x) A' B'."""

import contextlib
import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.config.sections import Method
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel

ALL_LINEAR = "all-linear"
VARIANTS = ("lora",)


@dataclass(frozen=True)
class LoRASettings:
    """What an adapter is, apart from its weights."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank update, which starts at zero."""

    def __init__(self, base: nn.Linear, settings: LoRASettings) -> None:
        super().__init__()
        if settings.rank < 1:
            raise ConfigError(f"rank {settings.rank}: an adapter needs a rank of at least 1")
        self.base = base
        self.settings = settings
        self.scale = settings.alpha / settings.rank
        self.enabled = True
        # float32 whatever the base: small updates to bf16 weights would round away
        like = partial(torch.zeros, device=base.weight.device, dtype=torch.float32)
        self.lora_A = nn.Parameter(like(settings.rank, base.in_features))
        self.lora_B = nn.Parameter(like(base.out_features, settings.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base layer, plus the update while it is enabled."""
        if not self.enabled:
            return self.base(x)
        base, rate = self.base, self.settings.dropout
        if rate and self.training:
            update = F.linear(F.linear(F.dropout(x, rate), self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
            return base(x) + update * self.scale
        output: torch.Tensor = _LoRAProduct.apply(
            x, base.weight, base.bias, self.lora_A, self.lora_B, self.scale
        )
        return output

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

    def merged_weight(self) -> torch.Tensor:
        """W + scale * B A, computed in float32, in the dtype of the base."""
        update = (self.lora_B.float() @ self.lora_A.float()) * self.scale
        return (self.base.weight.float() + update).to(self.base.weight.dtype)


class _LoRAProduct(torch.autograd.Function):
    """Base product and update in one node: nothing is kept for the frozen weight, sums happen in place."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(weight.dtype)
            low = flat @ a.to(weight.dtype).T  # [tokens, rank]
            y = F.linear(flat, weight, bias).addmm_(low, b.to(weight.dtype).T, alpha=scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale, ctx.shape, ctx.dtype = scale, x.shape, x.dtype
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        flat, low, weight, a, b = ctx.saved_tensors
        grad_x = None
        with torch.autocast(upstream.device.type, enabled=False):
            grad = upstream.reshape(-1, upstream.shape[-1])
            grad_low = (grad @ b.to(grad.dtype)) * ctx.scale
            if ctx.needs_input_grad[0]:
                grad_x = (grad @ weight).addmm_(grad_low, a.to(grad.dtype))
                grad_x = grad_x.view(ctx.shape).to(ctx.dtype)
            grad_a = (grad_low.T @ flat).to(a.dtype)
            grad_b = (grad.T @ (low * ctx.scale)).to(b.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def attach_lora(
    model: LanguageModel,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    variant: str = "lora",
    dropout: float = 0.0,
    layers: int | Sequence[int] | None = None,
) -> LanguageModel:
    """Freeze the model and put adapters on its linear layers, in place.

    `targets` is "all-linear" (all but the output head) or names such as ["q_proj", "v_proj"]; `layers` limits
    them to the last N layers (a number) or to the layers listed.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown adapter variant {variant!r}", hint=f"known: {', '.join(VARIANTS)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout {dropout} is not in [0, 1)")
    if any(True for _ in adapted(model)):
        raise ConfigError("the model has adapters already", hint="merge them first: whet.merge(model)")
    settings = LoRASettings(rank=rank, alpha=alpha, dropout=dropout)
    chosen = _matching(model, targets, layers)
    model.requires_grad_(False)
    for name in chosen:
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        _replace(model, name, LoRALinear(base, settings))
    return model


def attach_configured(model: LanguageModel, method: Method) -> LanguageModel:
    """`attach_lora` as a run's config says."""
    return attach_lora(
        model,
        rank=method.rank,
        alpha=method.alpha,
        targets=method.targets,
        variant=method.variant,
        dropout=method.dropout,
        layers=method.layers,
    )


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers of a model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def merge(model: LanguageModel) -> LanguageModel:
    """Fold every adapter into its base weight and remove it, in place."""
    with torch.no_grad():
        for name, module in list(adapted(model)):
            module.base.weight.copy_(module.merged_weight())
            _replace(model, name, module.base)
    return model


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The untouched base, for the time of a `with` block."""
    layers = [module for _, module in adapted(model)]
    before = [module.enabled for module in layers]
    for module in layers:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(layers, before, strict=True):
            module.enabled = enabled


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)


def _matching(
    model: LanguageModel, targets: str | Sequence[str], layers: int | Sequence[int] | None
) -> list[str]:
    """The linear layers that targets and layers select; a target that selects nothing is an error."""
    head = model.head().weight
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight is not head
    ]
    if targets == ALL_LINEAR:
        chosen = set(linears)
    else:
        chosen = set()
        known = sorted({name.rpartition(".")[2] for name in linears})
        for target in [targets] if isinstance(targets, str) else targets:
            found = {name for name in linears if name == target or name.endswith(f".{target}")}
            if not found:
                near = difflib.get_close_matches(target, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"adapter target {target!r} matches no linear layer of this model",
                    hint=f"{hint}known: {', '.join(known)}, or {ALL_LINEAR}",
                )
            chosen |= found
    if layers is not None:
        chosen &= _inside_layers(model, layers)
    if not chosen:
        raise ConfigError("no layer was left to adapt", hint="check method.targets and method.layers")
    return [name for name in linears if name in chosen]


def _inside_layers(model: LanguageModel, layers: int | Sequence[int]) -> set[str]:
    blocks = list(model.blocks())
    wanted = range(len(blocks) - layers, len(blocks)) if isinstance(layers, int) else layers
    if any(not 0 <= index < len(blocks) for index in wanted) or not len(wanted):
        raise ConfigError(f"layers {layers} do not fit a model of {len(blocks)} layers")
    inside = {id(module) for index in wanted for module in blocks[index].modules()}
    return {name for name, module in model.named_modules() if id(module) in inside}
