"""mlx-lm's layout: adapter_config.json and adapters.safetensors, with A as [in, rank] and B as [rank, out].

It supports a single rank and scale, and the same layers (`keys`) in each of the last `num_layers` blocks, so
it cannot represent every adapter.
"""

from pathlib import Path

import torch

from whet.adapters.adapter import LoRASettings, StoredLayer, named_adapters
from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.formats.adapter_state import MLX_WEIGHTS, StoredAdapter
from whet.model_io.safetensors import read_tensors
from whet.models.language_model import LanguageModel
from whet.storage import read_json, write_json, write_safetensors

CONFIG = "adapter_config.json"
_PARTS = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}


def write_mlx(directory: Path, model: LanguageModel, stored: StoredAdapter) -> None:
    """Write adapter_config.json and adapters.safetensors."""
    if any(layer.experts for layer in stored.layers.values()):
        raise _unsupported("adapters of fused experts")
    if stored.parameters:
        raise _unsupported(f"modules trained in full ({', '.join(list(stored.parameters)[:4])})")
    ranks_and_scales = {(layer.settings.rank, layer.settings.scale) for layer in stored.layers.values()}
    if len(ranks_and_scales) > 1:
        raise _unsupported("ranks or scales that differ between layers")
    rank, scale = ranks_and_scales.pop()
    keys, blocks = _keys(model, stored)
    settings = next(iter(stored.layers.values())).settings
    config = {
        "fine_tune_type": "dora" if settings.variant == "dora" else "lora",
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": settings.dropout, "keys": keys},
        "model": stored.base,
        "num_layers": blocks,
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in stored.layers.items():
        tensors |= {f"{name}.lora_a": layer.a.T, f"{name}.lora_b": layer.b.T}
        if layer.magnitude is not None:
            tensors[f"{name}.m"] = layer.magnitude
    write_json(directory / CONFIG, config)
    write_safetensors(directory / MLX_WEIGHTS, tensors)


def _unsupported(feature: str) -> ModelError:
    return ModelError(
        f"the mlx layout does not support {feature}",
        hint="use the peft layout, or merge the adapter and export the full model",
    )


def _keys(model: LanguageModel, stored: StoredAdapter) -> tuple[list[str], int]:
    """Return the names of the adapted layers, relative to their block, and the number of adapted blocks."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [model.hf_name(names[id(block)]) for block in model.blocks()]
    relative = {
        block: {name.removeprefix(f"{block}.") for name in stored.layers if name.startswith(f"{block}.")}
        for block in blocks
    }
    adapted_blocks = [block for block in blocks if relative[block]]
    keys = set().union(*relative.values())
    adapters = {name for name, _ in named_adapters(model)}
    modules = {
        model.hf_name(name)
        for name, _ in model.named_modules()
        if not any(name.startswith(f"{adapter}.") for adapter in adapters)
    }
    required = {f"{block}.{key}" for block in adapted_blocks for key in keys} & modules
    is_suffix = adapted_blocks == blocks[len(blocks) - len(adapted_blocks) :]
    if not is_suffix or not required <= stored.layers.keys():
        raise _unsupported("anything but the same layers of each of the last N blocks")
    outside = {name for name in stored.layers if not any(name.startswith(f"{block}.") for block in blocks)}
    return sorted(keys | outside), len(adapted_blocks)


def read_mlx_settings(directory: Path) -> LoRASettings:
    """Read the settings of all layers from adapter_config.json."""
    config = read_json(directory / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise ModelError(
            f"{directory / CONFIG}: fine_tune_type {kind!r} is not an adapter",
            hint="whet supports lora and dora",
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or not {"rank", "scale"} <= parameters.keys():
        raise ModelError(f"{directory / CONFIG} has no lora_parameters with a rank and a scale")
    with invalid_input_errors(f"{directory / CONFIG} is invalid"):
        rank, scale = int(parameters["rank"]), float(parameters["scale"])
        dropout = float(parameters.get("dropout") or 0.0)
        return LoRASettings(rank, scale * rank, dropout, kind).validated()


def read_mlx(directory: Path) -> StoredAdapter:
    """Read an adapter that mlx-lm or `write_mlx` wrote."""
    settings = read_mlx_settings(directory)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(directory / MLX_WEIGHTS).items():
        name, _, part = key.rpartition(".")
        if part not in _PARTS:
            raise ModelError(f"{directory / MLX_WEIGHTS}: {key} is not a tensor of an adapter")
        layers.setdefault(name, {})[_PARTS[part]] = tensor.T if tensor.dim() == 2 else tensor
    expected = {"a", "b", "magnitude"} if settings.variant == "dora" else {"a", "b"}
    incomplete = [name for name, parts in layers.items() if parts.keys() != expected]
    if incomplete:
        raise ModelError(
            f"{directory / MLX_WEIGHTS}: the adapter of {', '.join(incomplete[:4])} is incomplete"
        )
    return StoredAdapter(
        {
            name: StoredLayer(
                settings,
                parts["a"],
                parts["b"],
                parts.get("magnitude"),
                embedding=name.rpartition(".")[2] == "embed_tokens",
            )
            for name, parts in layers.items()
        },
        base=read_json(directory / CONFIG).get("model"),
    )
