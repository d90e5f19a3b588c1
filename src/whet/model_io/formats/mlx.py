"""mlx-lm's layout: adapters.safetensors, A as [in, rank] and B as [rank, out], beside adapter_config.json.

It has one rank and one scale, and adapts the same layers (`keys`) in each of the last `num_layers` blocks, so
not every adapter fits into it.
"""

from pathlib import Path

import torch

from whet.adapters.adapter import LoRASettings, StoredLayer, adapted
from whet.error_boundary import wrong_input
from whet.errors import ModelError
from whet.model_io.formats.adapter_state import MLX_WEIGHTS, StoredAdapter
from whet.model_io.safetensors import read_tensors
from whet.models.language_model import LanguageModel
from whet.storage import read_json, write_json, write_safetensors

CONFIG = "adapter_config.json"
_PARTS = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}


def write_mlx(directory: Path, model: LanguageModel, stored: StoredAdapter) -> None:
    """Write the files that mlx-lm loads."""
    if any(layer.experts for layer in stored.layers.values()):
        raise _cannot_hold("adapters of fused experts")
    if stored.whole:
        raise _cannot_hold(f"modules trained whole ({', '.join(list(stored.whole)[:4])})")
    kinds = {(layer.settings.rank, layer.settings.scale) for layer in stored.layers.values()}
    if len(kinds) > 1:
        raise _cannot_hold("ranks or scales that differ from layer to layer")
    rank, scale = kinds.pop()
    keys, blocks = _keys(model, stored)
    settings = next(iter(stored.layers.values())).settings
    config = {
        "fine_tune_type": "dora" if settings.variant == "dora" else "lora",
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": settings.dropout, "keys": keys},
        "model": stored.origin,
        "num_layers": blocks,
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in stored.layers.items():
        tensors |= {f"{name}.lora_a": layer.a.T, f"{name}.lora_b": layer.b.T}
        if layer.magnitude is not None:
            tensors[f"{name}.m"] = layer.magnitude
    write_json(directory / CONFIG, config)
    write_safetensors(directory / MLX_WEIGHTS, tensors)


def _cannot_hold(what: str) -> ModelError:
    return ModelError(
        f"the mlx layout cannot hold {what}",
        hint="write it in the peft layout, or merge it and write a whole model",
    )


def _keys(model: LanguageModel, stored: StoredAdapter) -> tuple[list[str], int]:
    """Names of the adapted layers, those in a block relative to it, and how many blocks have them."""
    own_names = {id(module): name for name, module in model.named_modules()}
    blocks = [model.hf_name(own_names[id(block)]) for block in model.blocks()]
    relative = {
        block: {name.removeprefix(f"{block}.") for name in stored.layers if name.startswith(f"{block}.")}
        for block in blocks
    }
    inside = [block for block in blocks if relative[block]]
    keys = set().union(*relative.values())
    bases = {name for name, _ in adapted(model)}
    everything = {
        model.hf_name(name)
        for name, _ in model.named_modules()
        if not any(name.startswith(f"{base}.") for base in bases)
    }
    wanted = {f"{block}.{key}" for block in inside for key in keys} & everything
    if inside != blocks[len(blocks) - len(inside) :] or not wanted <= stored.layers.keys():
        raise _cannot_hold("anything but the same layers of each of the last N blocks")
    outside = {name for name in stored.layers if not any(name.startswith(f"{block}.") for block in blocks)}
    return sorted(keys | outside), len(inside)


def read_mlx(directory: Path) -> StoredAdapter:
    """Read what mlx-lm, or `write_mlx`, wrote."""
    config = read_json(directory / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise ModelError(
            f"{directory / CONFIG}: fine_tune_type {kind!r} is not an adapter",
            hint="whet reads lora and dora",
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or not {"rank", "scale"} <= parameters.keys():
        raise ModelError(f"{directory / CONFIG} has no lora_parameters with a rank and a scale")
    with wrong_input(f"{directory / CONFIG} cannot be understood"):
        rank, scale = int(parameters["rank"]), float(parameters["scale"])
        dropout = float(parameters.get("dropout") or 0.0)
        settings = LoRASettings(rank, scale * rank, dropout, kind).checked()
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for full, tensor in read_tensors(directory / MLX_WEIGHTS).items():
        name, _, part = full.rpartition(".")
        if part not in _PARTS:
            raise ModelError(f"{directory / MLX_WEIGHTS}: {full} is not a tensor of an adapter")
        layers.setdefault(name, {})[_PARTS[part]] = tensor.T if tensor.dim() == 2 else tensor
    expected = {"a", "b", "magnitude"} if kind == "dora" else {"a", "b"}
    odd = [name for name, parts in layers.items() if parts.keys() != expected]
    if odd:
        raise ModelError(
            f"{directory / MLX_WEIGHTS} does not hold all of the adapter of {', '.join(odd[:4])}"
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
        origin=config.get("model"),
    )
