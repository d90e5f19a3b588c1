"""Select the layers of a model that get adapters, and the rank and alpha of each."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import nn

from whet.adapters.layers.lora_experts import expert_weights, router_weights
from whet.adapters.nf4 import NF4Linear
from whet.config.checks.patterns import compile_pattern
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.models.moe import Router
from whet.ops.linear import Linear

T = TypeVar("T")

ALL_LINEAR = "all-linear"
EXPERTS = "experts"  # experts whose weights are fused into one tensor
ROUTERS = "routers"
_LINEAR_FORWARDS = nn.Linear.forward, Linear.forward
# the patterns match the layer names of whet's model families and of transformers
_ATTENTION = r".*(attn|attention).*"
SHORTHANDS = {
    ALL_LINEAR: ".*",
    "qv": rf"{_ATTENTION}\.(q_proj|v_proj|query|value|wq|wv|q_lin|v_lin)",
    "attention": rf"{_ATTENTION}\.[^.]+",
    "mlp": r".*(mlp|feed_forward|ffn|moe|expert).*\.[^.]+",
    EXPERTS: ".*",
    ROUTERS: ".*",
}


def linear_layers(model: LanguageModel) -> list[str]:
    """Return the layers that "all-linear" selects.

    These are the linear layers except the head, routers, and gates with a single output.
    """
    head = model.head().weight
    return [
        name
        for name, module in model.named_modules()
        if is_linear(module)
        and (isinstance(module, NF4Linear) or (module.weight is not head and module.out_features > 1))
    ]


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear | NF4Linear]:
    """Return whether a module computes x W' + bias and is not a router.

    Subclasses of nn.Linear may compute something else, so the forward method is compared.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, Router):
        return isinstance(module, NF4Linear)
    return type(module).forward in _LINEAR_FORWARDS or type(module).__name__ == "FalconLinear"


def select_layers(
    model: LanguageModel, targets: str | Sequence[str], layers: int | Sequence[int] | None
) -> list[str]:
    """Return the names of the layers that `targets` and `layers` select, in model order.

    Raises:
        ConfigError: A target matches no layer, or no layer is left.
    """
    linear, experts, routers = linear_layers(model), list(expert_weights(model)), list(router_weights(model))
    modules = [
        name
        for name, module in model.named_modules()
        if is_linear(module) or isinstance(module, nn.Embedding)
    ]
    candidates = [*modules, *experts, *routers]
    by_shorthand = {**dict.fromkeys(SHORTHANDS, linear), EXPERTS: experts, ROUTERS: routers}
    selected: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        selected |= _match_target(model, target, by_shorthand.get(target, candidates))
    if layers is not None:
        prefixes = tuple(f"{name}." for name in _block_names(model, layers))
        selected = {name for name in selected if name.startswith(prefixes)}
    if not selected:
        raise ConfigError("no layer is left to adapt", hint="check method.targets and method.layers")
    return [name for name in candidates if name in selected]


def _match_target(model: LanguageModel, target: str, candidates: Sequence[str]) -> set[str]:
    pattern = SHORTHANDS.get(target, target)
    if matches := {name for name in candidates if layer_matches(model, name, pattern)}:
        return matches
    if target in SHORTHANDS:
        linear = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
        raise ConfigError(
            f"adapter target {target!r}: this model has no such layers",
            hint=f"its linear layers are {', '.join(linear)}" if linear else None,
        )
    known = sorted({name.rpartition(".")[2] for name in candidates})
    raise ConfigError(
        f"adapter target {target!r} matches no linear layer of this model",
        hint=f"{_suggestion(target, [*known, *SHORTHANDS])}use {', '.join(known)}, or "
        f"{', '.join(SHORTHANDS)}",
    )


def layer_matches(model: LanguageModel, name: str, pattern: str) -> bool:
    """Return whether a pattern matches the end of a layer's path, in whet's or Hugging Face's naming."""
    try:
        compiled = compile_pattern(pattern, before=r"(.*\.)?")
    except ValueError as error:
        hint = "correct this pattern in method.targets, method.rank_pattern or method.alpha_pattern"
        raise ConfigError(str(error), hint=hint) from error
    return bool(compiled.fullmatch(name) or compiled.fullmatch(model.hf_name(name)))


def values_per_layer(
    model: LanguageModel, layers: Iterable[str], patterns: Mapping[str, T], default: T
) -> dict[str, T]:
    """Return a value for each layer: that of the first matching pattern, or the default."""
    layers = list(layers)
    for pattern in patterns:
        if not any(layer_matches(model, name, pattern) for name in layers):
            raise ConfigError(
                f"pattern {pattern!r} matches no adapted layer",
                hint=_suggestion(pattern, sorted({name.rpartition(".")[2] for name in layers})),
            )
    return {
        name: next(
            (value for pattern, value in patterns.items() if layer_matches(model, name, pattern)), default
        )
        for name in layers
    }


def tied_to_head(model: LanguageModel) -> list[str]:
    """Return the names of the modules that share the head's weight, or [] if no embedding is among them."""
    head = model.head().weight
    owners = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "_parameters", {}).get("weight") is head
    }
    return list(owners) if any(isinstance(module, nn.Embedding) for module in owners.values()) else []


def select_modules_to_save(model: LanguageModel, targets: Sequence[str]) -> list[str]:
    """Return the modules to train in full: the named ones and the modules inside them.

    Naming a tied head or embedding selects both.
    """
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if name and any(True for _ in _tensors(module))]
    owners = tied_to_head(model)
    selected: set[str] = set()
    for target in targets:
        matches = {name for name in names if layer_matches(model, name, re.escape(target))}
        if owners and (target == "lm_head" or matches & set(owners)):
            matches |= set(owners)
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()})
            raise ConfigError(
                f"method.modules_to_save: {target!r} is not a module of this model",
                hint=f"{_suggestion(target, known)}its modules are {', '.join(known)}",
            )
        selected |= matches
    prefixes = tuple(f"{name}." for name in selected)
    with_submodules = [name for name in modules if name in selected or name.startswith(prefixes)]
    if quantized := [name for name in with_submodules if isinstance(modules[name], NF4Linear)]:
        raise ConfigError(
            f"method.modules_to_save: {quantized[0]} is quantized to 4 bits and cannot be trained in full"
        )
    return [name for name in with_submodules if any(True for _ in modules[name].parameters(recurse=False))]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()  # 4-bit layers store their weight in buffers


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _block_names(model: LanguageModel, layers: int | Sequence[int]) -> list[str]:
    """Return the names of the last `layers` blocks, or of the blocks with these indices."""
    blocks = list(model.blocks())
    indices = range(len(blocks) - layers, len(blocks)) if isinstance(layers, int) else layers
    if any(not 0 <= index < len(blocks) for index in indices) or not len(indices):
        raise ConfigError(f"layers {layers} is out of range: the model has {len(blocks)} layers")
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(blocks[index])] for index in indices]
