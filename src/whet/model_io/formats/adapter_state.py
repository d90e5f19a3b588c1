"""Convert between the adapters of a model and a layout-independent stored form."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from whet.adapters.adapter import StoredLayer, adapters_off, named_adapters
from whet.adapters.attach import insert_adapters
from whet.adapters.layers.lora_experts import expert_shape, parameter_targets
from whet.adapters.nf4 import NF4Linear
from whet.adapters.targets import tied_to_head
from whet.errors import ConfigError, ModelError
from whet.models.language_model import LanguageModel

MLX_WEIGHTS = "adapters.safetensors"  # a directory with this file has the mlx-lm layout


@dataclass(frozen=True)
class StoredAdapter:
    """A complete adapter, with Hugging Face names."""

    layers: dict[str, StoredLayer]  # by module
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # of modules trained in full
    base_weights: dict[str, torch.Tensor] = field(default_factory=dict)  # which some libraries store as well
    base: str | None = None  # the base model that it was trained on


def collect_adapter(model: LanguageModel) -> StoredAdapter:
    """Return the stored form of a model's adapters."""
    layers_by_name, parameters_by_name = _adapter_tensors(model)
    layers = {model.hf_name(name): layer for name, layer in layers_by_name.items()}
    parameters = {}
    with adapters_off(model):
        tied = {name.removesuffix(".base") for name in tied_to_head(model)}
    for name, parameter in parameters_by_name.items():
        parameters[model.hf_name(name)] = model.to_hf_layout(name, parameter)
        if name.rpartition(".")[0] in tied:
            # stored under both names, because a library that finds only one would untie them
            parameters[model.hf_name("lm_head.weight")] = parameter
    if not layers and not parameters:
        raise ModelError("the model has no adapter to save", hint="attach one: whet.attach_lora(model)")
    return StoredAdapter(layers, parameters, base=model.name)


def attach_stored(model: LanguageModel, stored: StoredAdapter, *, directory: Path) -> None:
    """Attach a stored adapter to a model. If a tensor does not match, raise and leave the model unchanged."""
    if any(True for _ in named_adapters(model)):
        raise ConfigError("the model already has adapters", hint="merge them first: whet.merge(model)")
    names = {model.hf_name(name): name for name, _ in model.named_modules()}
    names |= {model.hf_name(name): name for name in parameter_targets(model)}
    problems = [*_layer_problems(model, stored, names), *_parameter_problems(model, stored)]
    problems += _base_weight_problems(model, stored)
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"the adapter in {directory} does not match this model: " + "; ".join(problems[:4]) + more,
            hint=f"it was trained on {stored.base}",
        )
    parameters = _parameters_by_name(model, stored)
    modules_to_save = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    settings = {names[name]: layer.settings for name, layer in stored.layers.items()}
    insert_adapters(model, settings, modules_to_save)
    target_layers, target_parameters = _adapter_tensors(model)
    with torch.no_grad():
        for name, layer in stored.layers.items():
            target = target_layers[names[name]]
            target.a.copy_(layer.a)
            target.b.copy_(layer.b)
            if target.magnitude is not None and layer.magnitude is not None:
                target.magnitude.copy_(layer.magnitude)
        for name, tensor in parameters.items():
            target_parameters[name].copy_(model.to_hf_layout(name, tensor))


def _adapter_tensors(model: LanguageModel) -> tuple[dict[str, StoredLayer], dict[str, torch.Tensor]]:
    """Return the low-rank updates and the parameters trained in full, by their names in this model."""
    layers: dict[str, StoredLayer] = {}
    parameters: dict[str, torch.Tensor] = {}
    for name, module in named_adapters(model):
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
            problems.append(f"{name} is not an adaptable layer of this model")
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


def _parameter_problems(model: LanguageModel, stored: StoredAdapter) -> list[str]:
    known = {
        model.hf_name(n): model.to_hf_layout(n, p) for n, p in model.named_parameters(remove_duplicate=False)
    }
    tied = {model.hf_name(f"{name}.weight") for name in tied_to_head(model)}
    if tied:
        tied.add(model.hf_name("lm_head.weight"))
        known |= dict.fromkeys(tied, model.head().weight)
    problems = [f"{name} is not a parameter of this model" for name in stored.parameters if name not in known]
    problems += [
        f"{name} is {list(tensor.shape)}, expected {list(known[name].shape)}"
        for name, tensor in stored.parameters.items()
        if name in known and tensor.shape != known[name].shape
    ]
    modules = {name.rpartition(".")[0] for name in stored.parameters}
    problems += [
        f"{name} is missing"
        for name in known
        if name.rpartition(".")[0] in modules and name not in stored.parameters
    ]
    copies = [stored.parameters[name] for name in tied if name in stored.parameters]
    if copies and (len(copies) < len(tied) or any(not torch.equal(copies[0], copy) for copy in copies)):
        problems.append(f"{' and '.join(sorted(tied))} are tied in this model, but not in the adapter")
    return problems


def _base_weight_problems(model: LanguageModel, stored: StoredAdapter) -> list[str]:
    expected = {model.hf_name(n): model.to_hf_layout(n, p) for n, p in model.named_parameters()}
    return [
        f"{name} differs from the base model: it was resized or trained"
        for name, tensor in stored.base_weights.items()
        if name not in expected
        or tensor.shape != expected[name].shape
        or not _is_close(tensor, expected[name])
    ]


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of the narrower dtype.

    In plans the model has no values, so nothing is compared.
    """
    if expected.is_meta:
        return True
    actual, expected = actual.float(), expected.detach().float().cpu()
    return bool((actual - expected).norm() <= 1e-2 * expected.norm())


def _parameters_by_name(model: LanguageModel, stored: StoredAdapter) -> dict[str, torch.Tensor]:
    """Return the stored parameters trained in full, by their names in this model."""
    return {
        name: stored.parameters[model.hf_name(name)]
        for name, _ in model.named_parameters(remove_duplicate=False)
        if model.hf_name(name) in stored.parameters
    }
