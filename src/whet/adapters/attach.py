"""Attach adapters to a model, and fold them into it."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from whet.adapters.adapter import Adapter, LoRASettings, adapted, replace_module
from whet.adapters.layers.lora_embedding import LoRAEmbedding
from whet.adapters.layers.lora_experts import LoRAExperts, expert_shape, fused_weights
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.modules_to_save import retrain
from whet.adapters.nf4 import NF4Linear
from whet.adapters.targets import ALL_LINEAR, chosen_layers, per_layer, saved_modules, tied_to_head
from whet.config.method import Method
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.models.language_model import LanguageModel
from whet.ops.dispatch import using

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
    """Freeze the model and put adapters on its linear layers, in place.

    `targets` is "all-linear" (all but the output head), another shorthand ("qv", "attention", "mlp"), or
    names or regular expressions for the end of a layer's path; `layers` limits them to the last N layers (a
    number) or to the layers listed. The patterns, in the same language, give some layers a rank or alpha of
    their own. `modules_to_save` are trained whole.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown adapter variant {variant!r}", hint=f"known: {', '.join(VARIANTS)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout {dropout} is not in [0, 1)")
    if any(True for _ in adapted(model)):
        raise ConfigError("the model has adapters already", hint="merge them first: whet.merge(model)")
    chosen = chosen_layers(model, targets, layers)
    ranks = per_layer(model, chosen, rank_pattern or {}, rank)
    alphas = per_layer(model, chosen, alpha_pattern or {}, alpha)
    settings = {name: LoRASettings(ranks[name], alphas[name], dropout, variant) for name in chosen}
    fused = fused_weights(model)
    for name, each in settings.items():
        if not each.alpha > 0:
            raise ConfigError(f"alpha {each.alpha:g}: it must be above 0, or the adapter does nothing")
        _check_rank(name, each.rank, _shape(model, name, is_fused=name in fused))
        if dropout and name not in fused and model.get_submodule(name).weight is model.head().weight:
            raise ConfigError(
                f"{name}: the head cannot have dropout, since its weight is read and it is not called",
                hint="set method.dropout to 0, or leave the head out of method.targets",
            )
    put_adapters(model, settings, saved_modules(model, modules_to_save))
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
        rank_pattern=method.rank_pattern,
        alpha_pattern=method.alpha_pattern,
        modules_to_save=method.modules_to_save,
    )


def make_trainable(model: LanguageModel, method: Method, *, dtype: torch.dtype) -> None:
    """Every weight, or the adapters that a config asks for; what trains is held in `dtype`."""
    if method.kind == "full":
        model.requires_grad_(True)
    else:
        attach_configured(model, method)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def put_adapters(
    model: LanguageModel, settings: Mapping[str, LoRASettings], saved: Sequence[str] = ()
) -> None:
    """Freeze the model, adapt the layers named, and train the modules in `saved` whole."""
    if both := sorted(settings.keys() & set(saved)):
        raise ConfigError(
            f"{both[0]} cannot have an adapter and be trained whole: drop it from one of the two"
        )
    with using(model.paths):
        made = _adapters(model, settings)
    model.requires_grad_(False)
    for name, module in made.items():
        replace_module(model, name, module)
    retrain(model, list(saved))


def _adapters(model: LanguageModel, settings: Mapping[str, LoRASettings]) -> dict[str, Adapter]:
    """New adapters, by the names of the modules they are for."""
    fused, tied = fused_weights(model), tied_to_head(model)
    made: dict[str, Adapter] = {
        name: _adapter(model, name, each, is_tied=name in tied)
        for name, each in settings.items()
        if name not in fused
    }
    by_module: dict[str, dict[str, LoRASettings]] = {}
    for name in (name for name in fused if name in settings):  # in the module's own order, as PEFT nests them
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, {})[leaf] = settings[name]
    experts = {path: LoRAExperts(model.get_submodule(path), each) for path, each in by_module.items()}
    return {**made, **experts}


def _adapter(model: LanguageModel, name: str, settings: LoRASettings, *, is_tied: bool) -> Adapter:
    base = model.get_submodule(name)
    if is_tied:
        raise ConfigError(
            f"{name} is tied: an update of the embedding would also be one of the head",
            hint="train both whole instead: method.modules_to_save",
        )
    if isinstance(base, nn.Linear | NF4Linear):
        layer: LoRALinear = load_object(VARIANTS[settings.variant])(base, settings)
        return layer
    assert isinstance(base, nn.Embedding)
    if settings.variant not in ("lora", "rslora"):
        raise ConfigError(f"{name}: {settings.variant} is for linear layers, not for embeddings")
    return LoRAEmbedding(base, settings)


def _shape(model: LanguageModel, name: str, *, is_fused: bool) -> tuple[int, int]:
    """Inputs and outputs of a layer."""
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
        raise ConfigError(f"rank {rank}: an adapter needs a rank of at least 1")
    if rank > min(shape):
        raise ConfigError(
            f"rank {rank} is above what {name} can have: it maps {shape[0]} values to {shape[1]}",
            hint="lower method.rank, or give this layer a rank of its own: method.rank_pattern",
        )


def merge(model: LanguageModel) -> LanguageModel:
    """Fold every adapter into its base weight and remove it, in place; quantised layers become plain ones.

    The result is no longer the model that it was loaded as, so it loses its name.
    """
    with torch.no_grad():
        for name, module in list(adapted(model)):
            replace_module(model, name, module.folded())
            model.name = None
        for name, layer in list(model.named_modules()):
            if isinstance(layer, NF4Linear):
                replace_module(model, name, layer.to_linear())
                model.name = None
    return model
