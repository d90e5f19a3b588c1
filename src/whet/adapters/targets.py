"""Which layers of a model get adapters, and which rank and alpha each of them gets."""

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
EXPERTS = "experts"  # weights of experts that are one tensor
ROUTERS = "routers"
_PLAIN = nn.Linear.forward, Linear.forward
# by the names that native families and the classes of transformers use
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
    """The layers that all-linear means: linear ones but the head, routers and gates of a single output."""
    head = model.head().weight
    return [
        name
        for name, module in model.named_modules()
        if is_linear(module)
        and (isinstance(module, NF4Linear) or (module.weight is not head and module.out_features > 1))
    ]


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear | NF4Linear]:
    """Whether it is no router and computes x W' + bias: classes that inherit from a linear layer may not."""
    if not isinstance(module, nn.Linear) or isinstance(module, Router):
        return isinstance(module, NF4Linear)
    return type(module).forward in _PLAIN or type(module).__name__ == "FalconLinear"


def chosen_layers(
    model: LanguageModel, targets: str | Sequence[str], layers: int | Sequence[int] | None
) -> list[str]:
    """The layers that targets and layers select, in order; a target that selects nothing is an error."""
    linear, experts, routers = linear_layers(model), list(expert_weights(model)), list(router_weights(model))
    modules = [
        name
        for name, module in model.named_modules()
        if is_linear(module) or isinstance(module, nn.Embedding)
    ]
    every = [*modules, *experts, *routers]
    possible = {**dict.fromkeys(SHORTHANDS, linear), EXPERTS: experts, ROUTERS: routers}
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        chosen |= _found(model, target, possible.get(target, every))
    if layers is not None:
        inside = tuple(f"{name}." for name in _inside_layers(model, layers))
        chosen = {name for name in chosen if name.startswith(inside)}
    if not chosen:
        raise ConfigError("no layer was left to adapt", hint="check method.targets and method.layers")
    return [name for name in every if name in chosen]


def _found(model: LanguageModel, target: str, possible: Sequence[str]) -> set[str]:
    pattern = SHORTHANDS.get(target, target)
    if found := {name for name in possible if matches(model, name, pattern)}:
        return found
    if target in SHORTHANDS:
        linear = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
        raise ConfigError(
            f"adapter target {target!r}: this model has none of these layers",
            hint=f"its linear layers are {', '.join(linear)}" if linear else None,
        )
    known = sorted({name.rpartition(".")[2] for name in possible})
    raise ConfigError(
        f"adapter target {target!r} matches no linear layer of this model",
        hint=f"{_nearest(target, [*known, *SHORTHANDS])}known: {', '.join(known)}, or "
        f"{', '.join(SHORTHANDS)}",
    )


def matches(model: LanguageModel, name: str, pattern: str) -> bool:
    """Whether a regular expression fits the end of a layer's path, in whet's names or Hugging Face's."""
    try:
        whole = compile_pattern(pattern, before=r"(.*\.)?")
    except ValueError as error:
        hint = "correct this pattern in method.targets, method.rank_pattern or method.alpha_pattern"
        raise ConfigError(str(error), hint=hint) from error
    return bool(whole.fullmatch(name) or whole.fullmatch(model.hf_name(name)))


def per_layer(
    model: LanguageModel, chosen: Iterable[str], patterns: Mapping[str, T], usual: T
) -> dict[str, T]:
    """A value for each layer: that of the first pattern that fits it, else the usual one."""
    chosen = list(chosen)
    for pattern in patterns:
        if not any(matches(model, name, pattern) for name in chosen):
            raise ConfigError(
                f"pattern {pattern!r} fits no adapted layer",
                hint=_nearest(pattern, sorted({name.rpartition(".")[2] for name in chosen})),
            )
    return {
        name: next((value for pattern, value in patterns.items() if matches(model, name, pattern)), usual)
        for name in chosen
    }


def tied_to_head(model: LanguageModel) -> list[str]:
    """The modules that share the head's weight, if the embedding is one of them."""
    head = model.head().weight
    owners = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "_parameters", {}).get("weight") is head
    }
    return list(owners) if any(isinstance(module, nn.Embedding) for module in owners.values()) else []


def saved_modules(model: LanguageModel, wanted: Sequence[str]) -> list[str]:
    """The modules that are trained whole, those inside of one that is named included.

    A tied head or embedding stands for both.
    """
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if name and any(True for _ in _tensors(module))]
    owners = tied_to_head(model)
    chosen: set[str] = set()
    for target in wanted:
        found = {name for name in names if matches(model, name, re.escape(target))}
        if owners and (target == "lm_head" or found & set(owners)):
            found |= set(owners)
        if not found:
            known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()})
            raise ConfigError(
                f"method.modules_to_save: {target!r} is no module of this model",
                hint=f"{_nearest(target, known)}known: {', '.join(known)}",
            )
        chosen |= found
    inside = tuple(f"{name}." for name in chosen)
    whole = [name for name in modules if name in chosen or name.startswith(inside)]
    if packed := [name for name in whole if isinstance(modules[name], NF4Linear)]:
        raise ConfigError(f"method.modules_to_save: {packed[0]} is in 4 bits, which cannot be trained")
    return [name for name in whole if any(True for _ in modules[name].parameters(recurse=False))]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()  # of layers in 4 bits


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _inside_layers(model: LanguageModel, layers: int | Sequence[int]) -> list[str]:
    """The names of the blocks meant."""
    blocks = list(model.blocks())
    wanted = range(len(blocks) - layers, len(blocks)) if isinstance(layers, int) else layers
    if any(not 0 <= index < len(blocks) for index in wanted) or not len(wanted):
        raise ConfigError(f"layers {layers} do not fit a model of {len(blocks)} layers")
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(blocks[index])] for index in wanted]
