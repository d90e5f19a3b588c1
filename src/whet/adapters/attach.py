"""Attach adapters to a model, and merge them into its weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from whet.adapters.adapter import Adapter, LoRASettings, named_adapters, replace_module
from whet.adapters.layers.lora_experts import LoRAExperts, expert_shape, parameter_targets
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.modules_to_save import wrap_modules_to_save
from whet.adapters.nf4 import NF4Linear
from whet.adapters.targets import (
    ALL_LINEAR,
    select_layers,
    select_modules_to_save,
    tied_to_head,
    values_per_layer,
)
from whet.config.method import Method
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.models.language_model import LanguageModel
from whet.ops.dispatch import use_paths

VARIANTS = {
    "lora": "whet.adapters.layers.lora_linear:LoRALinear",
    "rslora": "whet.adapters.layers.lora_linear:LoRALinear",
    "dora": "whet.adapters.layers.dora:DoRALinear",
    "pissa": "whet.adapters.layers.pissa:PiSSALinear",
}


def attach_lora(
    model: LanguageModel,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    variant: str = "lora",
    dropout: float = 0.0,
    layers: int | Sequence[int] | None = None,
    *,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    modules_to_save: Sequence[str] = (),
) -> LanguageModel:
    """Freeze the model and attach LoRA adapters to its linear layers, in place.

    Args:
        model: The model to adapt. It must not have adapters.
        rank: The rank of the updates.
        alpha: The update is scaled by alpha / rank, or by alpha / sqrt(rank) for rsLoRA.
        targets: The layers to adapt: "all-linear" (every linear layer except the output head), another
            shorthand ("qv", "attention", "mlp", "experts", "routers"), or names or regular expressions that
            match the end of a layer's path.
        variant: One of "lora", "rslora", "dora" and "pissa".
        dropout: The dropout probability of the update's input.
        layers: Restrict the targets to the last N layers (an integer) or to the layers with these indices.
        rank_pattern: Ranks that override `rank`, by layer name or regular expression as in `targets`.
        alpha_pattern: Alphas that override `alpha`, likewise.
        modules_to_save: Modules to train in full next to the adapters.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model already has adapters, a target matches no layer, or a setting is invalid.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown adapter variant {variant!r}", hint=f"use one of {', '.join(VARIANTS)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout {dropout} is not in [0, 1)")
    if any(True for _ in named_adapters(model)):
        raise ConfigError("the model already has adapters", hint="merge them first: whet.merge(model)")
    selected = select_layers(model, targets, layers)
    ranks = values_per_layer(model, selected, rank_pattern or {}, rank)
    alphas = values_per_layer(model, selected, alpha_pattern or {}, alpha)
    settings = {name: LoRASettings(ranks[name], alphas[name], dropout, variant) for name in selected}
    fused = parameter_targets(model)
    for name, layer_settings in settings.items():
        if not layer_settings.alpha > 0:
            raise ConfigError(
                f"alpha {layer_settings.alpha:g} must be greater than 0, otherwise the adapter has no effect"
            )
        _check_rank(name, layer_settings.rank, _layer_shape(model, name, is_fused=name in fused))
        if name not in fused:
            check_dropout(model, name, dropout)
    insert_adapters(model, settings, select_modules_to_save(model, modules_to_save))
    return model


def check_dropout(model: LanguageModel, name: str, dropout: float) -> None:
    """Raise a ConfigError if the layer is the head, whose weight losses read without calling the layer."""
    if dropout and model.get_submodule(name).weight is model.head().weight:
        raise ConfigError(
            f"{name}: the head cannot have dropout, because losses read its weight without calling it",
            hint="set method.dropout to 0, or remove the head from method.targets",
        )


def attach_from_config(model: LanguageModel, method: Method) -> LanguageModel:
    """Attach the adapters that the `method` section of a config describes."""
    return attach_lora(
        model,
        rank=method.rank,
        alpha=method.alpha,
        targets=method.targets,
        variant=method.variant,
        dropout=method.dropout,
        layers=method.layers,
        rank_pattern=method.rank_pattern,
        alpha_pattern=method.alpha_pattern,
        modules_to_save=method.modules_to_save,
    )


def make_trainable(model: LanguageModel, method: Method, *, dtype: torch.dtype) -> None:
    """Make every weight trainable, or attach adapters, as `method` says. Trained parameters get `dtype`.

    With method.continue, the model has its trained adapters already.
    """
    if method.kind == "full":
        model.requires_grad_(True)
    elif not method.continues:
        attach_from_config(model, method)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def insert_adapters(
    model: LanguageModel, settings: Mapping[str, LoRASettings], modules_to_save: Sequence[str] = ()
) -> None:
    """Freeze the model, adapt the layers named in `settings`, and train `modules_to_save` in full."""
    if both := sorted(settings.keys() & set(modules_to_save)):
        raise ConfigError(
            f"{both[0]} cannot both have an adapter and be trained in full: "
            "remove it from the adapter targets or from modules_to_save"
        )
    with use_paths(model.paths):
        adapters = _create_adapters(model, settings)
    model.requires_grad_(False)
    for name, module in adapters.items():
        replace_module(model, name, module)
    wrap_modules_to_save(model, list(modules_to_save))


def _create_adapters(model: LanguageModel, settings: Mapping[str, LoRASettings]) -> dict[str, Adapter]:
    """Return new adapters by the names of the modules they adapt."""
    fused, tied = parameter_targets(model), tied_to_head(model)
    adapters: dict[str, Adapter] = {
        name: _create_adapter(model, name, layer_settings, is_tied=name in tied)
        for name, layer_settings in settings.items()
        if name not in fused
    }
    by_module: dict[str, dict[str, LoRASettings]] = {}
    for name in (name for name in fused if name in settings):  # in the module's order, as PEFT nests them
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, {})[leaf] = settings[name]
    experts = {path: LoRAExperts(model.get_submodule(path), weights) for path, weights in by_module.items()}
    return {**adapters, **experts}


def _create_adapter(model: LanguageModel, name: str, settings: LoRASettings, *, is_tied: bool) -> Adapter:
    base = model.get_submodule(name)
    if is_tied:
        raise ConfigError(
            f"{name} is tied: updating the embedding would also update the head",
            hint="train both in full instead: method.modules_to_save",
        )
    if isinstance(base, nn.Linear | NF4Linear):
        layer: LoRALinear = load_object(VARIANTS[settings.variant])(base, settings)
        return layer
    assert isinstance(base, nn.Embedding)
    if settings.variant not in ("lora", "rslora"):
        raise ConfigError(f"{name}: {settings.variant} supports linear layers, not embeddings")
    from whet.adapters.layers.lora_embedding import LoRAEmbedding

    return LoRAEmbedding(base, settings)


def _layer_shape(model: LanguageModel, name: str, *, is_fused: bool) -> tuple[int, int]:
    """Return the input and output size of a layer."""
    if is_fused:
        path, _, leaf = name.rpartition(".")
        return expert_shape(model.get_submodule(path), leaf)[1:]
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear | NF4Linear | nn.Embedding)
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.in_features, module.out_features


def _check_rank(name: str, rank: int, shape: tuple[int, int]) -> None:
    if rank < 1:
        raise ConfigError(f"rank {rank} is too small: an adapter needs a rank of at least 1")
    if rank > min(shape):
        raise ConfigError(
            f"rank {rank} is too large for {name}, which maps {shape[0]} values to {shape[1]}",
            hint="lower method.rank, or set a smaller rank for this layer: method.rank_pattern",
        )
