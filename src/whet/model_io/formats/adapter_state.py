"""An adapter between a model and a file, whatever the file's layout."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from whet.adapters.adapter import StoredLayer, adapted, adapters_off
from whet.adapters.attach import put_adapters
from whet.adapters.layers.lora_experts import expert_shape, fused_weights
from whet.adapters.nf4 import NF4Linear
from whet.adapters.targets import tied_to_head
from whet.errors import ConfigError, ModelError
from whet.models.language_model import LanguageModel

MLX_WEIGHTS = "adapters.safetensors"  # the file that mlx-lm's layout is known by


@dataclass(frozen=True)
class StoredAdapter:
    """All of an adapter, under Hugging Face's names."""

    layers: dict[str, StoredLayer]  # by module
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters of modules trained whole
    bases: dict[str, torch.Tensor] = field(default_factory=dict)  # base weights some libraries store with it
    origin: str | None = None  # the base it was made for


def collect(model: LanguageModel) -> StoredAdapter:
    """What there is to save of a model with adapters."""
    own_layers, own_parameters = _own_tensors(model)
    layers = {model.hf_name(name): layer for name, layer in own_layers.items()}
    whole = {}
    with adapters_off(model):
        tied = {name.removesuffix(".base") for name in tied_to_head(model)}
    for name, parameter in own_parameters.items():
        whole[model.hf_name(name)] = model.as_stored(name, parameter)
        if name.rpartition(".")[0] in tied:
            # under both names: a library that finds one would train it apart from the other
            whole[model.hf_name("lm_head.weight")] = parameter
    if not layers and not whole:
        raise ModelError("the model has no adapter to save", hint="attach one: whet.attach_lora(model)")
    return StoredAdapter(layers, whole, origin=model.name)


def attach_stored(model: LanguageModel, stored: StoredAdapter, *, directory: Path) -> None:
    """Attach what a file holds; every tensor must fit, and nothing is changed when one does not."""
    if any(True for _ in adapted(model)):
        raise ConfigError("the model has adapters already", hint="merge them first: whet.merge(model)")
    names = {model.hf_name(name): name for name, _ in model.named_modules()}
    names |= {model.hf_name(name): name for name in fused_weights(model)}
    problems = [*_layer_problems(model, stored, names), *_whole_problems(model, stored)]
    problems += _base_problems(model, stored)
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"the adapter in {directory} does not fit this model: " + "; ".join(problems[:4]) + more,
            hint=f"it was made for {stored.origin}",
        )
    whole = _own_parameters(model, stored)
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in whole))
    put_adapters(model, {names[name]: layer.settings for name, layer in stored.layers.items()}, saved)
    own_layers, own_parameters = _own_tensors(model)
    with torch.no_grad():
        for name, layer in stored.layers.items():
            own = own_layers[names[name]]
            own.a.copy_(layer.a)
            own.b.copy_(layer.b)
            if own.magnitude is not None and layer.magnitude is not None:
                own.magnitude.copy_(layer.magnitude)
        for name, tensor in whole.items():
            own_parameters[name].copy_(model.as_stored(name, tensor))


def _own_tensors(model: LanguageModel) -> tuple[dict[str, StoredLayer], dict[str, torch.Tensor]]:
    """The updates and the parameters trained in full, by this model's names."""
    layers: dict[str, StoredLayer] = {}
    parameters: dict[str, torch.Tensor] = {}
    for name, module in adapted(model):
        stored = module.stored()
        layers |= {f"{name}.{leaf}" if leaf else name: layer for leaf, layer in stored.layers.items()}
        parameters |= {f"{name}.{leaf}": tensor for leaf, tensor in stored.parameters.items()}
    return layers, parameters


def _layer_problems(model: LanguageModel, stored: StoredAdapter, names: dict[str, str]) -> list[str]:
    problems = []
    for name, layer in stored.layers.items():
        path, _, leaf = names.get(name, "").rpartition(".")
        module = getattr(model.get_submodule(path), leaf, None) if leaf else None
        count = 1
        if isinstance(module, nn.Parameter) and layer.experts:
            count, *size = expert_shape(model.get_submodule(path), leaf)
        elif isinstance(module, nn.Embedding) and layer.embedding:
            size = [module.num_embeddings, module.embedding_dim]
        elif isinstance(module, nn.Linear | NF4Linear) and not layer.embedding:
            size = [module.in_features, module.out_features]
        else:
            problems.append(f"{name} is no layer of this model that can be adapted")
            continue
        rank = count * layer.settings.rank
        parts = {"lora_A": (layer.a, [rank, size[0]]), "lora_B": (layer.b, [size[1], rank])}
        if layer.magnitude is not None:
            parts["lora_magnitude_vector"] = layer.magnitude, [size[1]]
        problems += [
            f"{name}.{part} is {list(tensor.shape)}, expected {shape}"
            for part, (tensor, shape) in parts.items()
            if list(tensor.shape) != shape
        ]
    return problems


def _whole_problems(model: LanguageModel, stored: StoredAdapter) -> list[str]:
    known = {
        model.hf_name(n): model.as_stored(n, p) for n, p in model.named_parameters(remove_duplicate=False)
    }
    tied = {model.hf_name(f"{name}.weight") for name in tied_to_head(model)}
    if tied:
        tied.add(model.hf_name("lm_head.weight"))
        known |= dict.fromkeys(tied, model.head().weight)
    problems = [f"{name} is no parameter of this model" for name in stored.whole if name not in known]
    problems += [
        f"{name} is {list(tensor.shape)}, expected {list(known[name].shape)}"
        for name, tensor in stored.whole.items()
        if name in known and tensor.shape != known[name].shape
    ]
    modules = {name.rpartition(".")[0] for name in stored.whole}
    problems += [
        f"{name} is not stored"
        for name in known
        if name.rpartition(".")[0] in modules and name not in stored.whole
    ]
    given = [stored.whole[name] for name in tied if name in stored.whole]
    if given and (len(given) < len(tied) or any(not torch.equal(given[0], tensor) for tensor in given)):
        problems.append(f"{' and '.join(sorted(tied))} are tied here, and trained apart there")
    return problems


def _base_problems(model: LanguageModel, stored: StoredAdapter) -> list[str]:
    own = {model.hf_name(n): model.as_stored(n, p) for n, p in model.named_parameters()}
    return [
        f"{name} is not the base's: it was resized or trained"
        for name, tensor in stored.bases.items()
        if name not in own or tensor.shape != own[name].shape or not _near(tensor, own[name])
    ]


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the rounding of the narrower dtype."""
    found, expected = found.float(), expected.detach().float().cpu()
    return bool((found - expected).norm() <= 1e-2 * expected.norm())


def _own_parameters(model: LanguageModel, stored: StoredAdapter) -> dict[str, torch.Tensor]:
    """The parameters trained whole, by this model's names."""
    return {
        name: stored.whole[model.hf_name(name)]
        for name, _ in model.named_parameters(remove_duplicate=False)
        if model.hf_name(name) in stored.whole
    }
