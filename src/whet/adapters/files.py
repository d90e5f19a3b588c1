"""Adapters on disk, in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.adapters.lora import adapted, attach_lora
from whet.errors import ConfigError, ModelError
from whet.models.language_model import LanguageModel
from whet.models.weights import read_json
from whet.storage import new_directory, write_json, write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LAYOUTS = ("peft",)
_PREFIX = "base_model.model."
# settings under which the same tensors mean something else
_OTHER_MATH = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)


def adapter_tensors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The adapter's weights under PEFT's names."""
    return {
        f"{_PREFIX}{model.hf_name(name)}.{part}.weight": getattr(module, part)
        for name, module in adapted(model)
        for part in ("lora_A", "lora_B")
    }


def save_adapter(
    model: LanguageModel, directory: str | Path, layout: str = "peft", *, tokenizer: Any = None
) -> None:  # Any: a transformers tokenizer
    """Write the adapter as a directory that PEFT loads."""
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown adapter layout {layout!r}", hint=f"known: {', '.join(LAYOUTS)}")
    modules = dict(adapted(model))
    if not modules:
        raise ModelError("the model has no adapter to save", hint="attach one: whet.attach_lora(model)")
    settings = next(iter(modules.values())).settings
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": _target_names(model, set(modules)),
        "bias": "none",
        "fan_in_fan_out": model.stores_transposed,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }
    with new_directory(Path(directory)) as staging:
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        write_json(staging / CONFIG, config)
        write_safetensors(staging / WEIGHTS, adapter_tensors(model))


def _target_names(model: LanguageModel, chosen: set[str]) -> list[str]:
    """Short names where they select exactly the adapted layers, else whole paths."""
    linear = {
        name: model.hf_name(name)
        for name, module in model.named_modules()
        if name in chosen or (isinstance(module, torch.nn.Linear) and not name.endswith(".base"))
    }
    leaves = {linear[name].rpartition(".")[2] for name in chosen}
    selected = {name for name, theirs in linear.items() if theirs.rpartition(".")[2] in leaves}
    return sorted(leaves) if selected == chosen else sorted(linear[name] for name in chosen)


def load_adapter(model: LanguageModel, directory: str | Path) -> LanguageModel:
    """Attach the adapter in a PEFT directory; every tensor must fit this model."""
    directory = Path(directory)
    config = read_json(directory / CONFIG)
    _check_supported(config, directory)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    rank = int(config["r"])
    chosen = _adapted_modules(model, tensors)
    shapes = {
        f"{_PREFIX}{model.hf_name(name)}.{part}.weight": shape
        for name, linear in chosen.items()
        for part, shape in (("lora_A", (rank, linear.in_features)), ("lora_B", (linear.out_features, rank)))
    }
    problems = [f"{name} is not in {WEIGHTS}" for name in shapes if name not in tensors]
    problems += [f"{name} fits no layer of this model" for name in tensors if name not in shapes]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise ModelError(
            f"the adapter in {directory} does not fit this model: " + "; ".join(problems[:4]),
            hint=f"it was made for {config.get('base_model_name_or_path')}",
        )
    attach_lora(
        model,
        rank=rank,
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout", 0.0)),
        targets=list(chosen),
    )
    expected = adapter_tensors(model)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
    return model


def _check_supported(config: dict[str, Any], directory: Path) -> None:  # Any: JSON values
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{directory / CONFIG}: peft_type {config.get('peft_type')!r} is not LORA")
    for key in _OTHER_MATH:
        if config.get(key):
            raise ModelError(f"{directory / CONFIG}: {key}={config[key]!r} is not supported")
    # the others change the base weights, which the file does not hold
    if config.get("init_lora_weights", True) not in (True, False, None, "gaussian", "orthogonal", "eva"):
        raise ModelError(
            f"{directory / CONFIG}: init_lora_weights={config['init_lora_weights']!r} is not supported",
            hint="save it from PEFT as a plain LoRA (path_initial_model_for_weight_conversion)",
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{directory / CONFIG}: bias={config['bias']!r} is not supported")
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ModelError(f"{directory / CONFIG} has no {key!r}")


def _adapted_modules(model: LanguageModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.nn.Linear]:
    """Which linear layers the tensors adapt: what is stored counts, not the config's patterns."""
    wanted = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and model.hf_name(name) in wanted
    }
