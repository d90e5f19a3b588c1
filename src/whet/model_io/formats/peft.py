"""PEFT's layout: adapter_config.json and adapter_model.safetensors, with the prefix `base_model.model.`."""

import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import LoRASettings, StoredLayer, named_adapters
from whet.adapters.layers.lora_experts import expert_shape, expert_weights, parameter_targets
from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.formats.adapter_state import StoredAdapter
from whet.model_io.formats.classifier_head import SCORE, is_classifier
from whet.model_io.safetensors import read_tensors
from whet.models.language_model import LanguageModel
from whet.storage import read_json, write_json, write_safetensors

log = logging.getLogger("whet")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT 0.21 takes layers with these names for experts if the model has fused experts
_EXPERT_SUFFIXES = ".gate_proj", ".up_proj", ".down_proj"
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# settings that change what the same tensors compute
_UNSUPPORTED_SETTINGS = (
    "use_qalora",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "kasa_config",
)
# all other initializations change the base weights, which the file does not contain
_SUPPORTED_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


def peft_tensors(stored: StoredAdapter) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter with PEFT's names."""
    tensors: dict[str, torch.Tensor] = {}
    nested = _nested_names([name for name, layer in stored.layers.items() if layer.experts])
    for name, layer in stored.layers.items():
        path = _PREFIX + nested.get(name, name)
        form = "lora_embedding_{}" if layer.embedding else "lora_{}.weight"
        tensors |= {f"{path}.{form.format('A')}": layer.a, f"{path}.{form.format('B')}": layer.b}
        if layer.magnitude is not None:
            tensors[f"{path}.lora_magnitude_vector"] = layer.magnitude
    return tensors | {f"{_PREFIX}{name}": tensor for name, tensor in stored.parameters.items()}


def _nested_names(weights: list[str]) -> dict[str, str]:
    """Return PEFT's names of adapters on fused weights: nested within a module, the last one outermost."""
    modules: dict[str, list[str]] = {}
    for name in weights:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * depth
        for module, names in modules.items()
        for depth, name in enumerate(reversed(names))
    }


def write_peft(directory: Path, model: LanguageModel, stored: StoredAdapter) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    common, ranks, alphas = _common_settings(stored)
    layers = {name for name, layer in stored.layers.items() if not layer.experts}
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if SCORE in stored.parameters else "CAUSAL_LM",
        "base_model_name_or_path": stored.base,
        "r": common.rank,
        "lora_alpha": common.alpha,
        "lora_dropout": common.dropout,
        "target_modules": _target_modules(layers, _module_names(model)),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in stored.parameters}) or None,
        "bias": "none",
        "fan_in_fan_out": model.stores_transposed,
        "inference_mode": True,
        "use_dora": common.variant == "dora",
        "use_rslora": common.variant == "rslora",
    }
    if mistaken := sorted(
        name for name in layers if name.endswith(_EXPERT_SUFFIXES) and expert_weights(model)
    ):
        log.warning(
            "PEFT mistakes the adapters of %s and similar layers for adapters of experts, and drops them. "
            "To use this adapter in other programs, merge it: whet export --to hf",
            mistaken[0],
        )
    if experts := sorted(stored.layers.keys() - layers):
        config["target_parameters"] = experts
    write_json(directory / CONFIG, config)
    write_safetensors(directory / WEIGHTS, peft_tensors(stored))


def _common_settings(stored: StoredAdapter) -> tuple[LoRASettings, dict[str, int], dict[str, float]]:
    """Return the most common settings, and the ranks and alphas of the layers that differ."""
    settings = {name: layer.settings for name, layer in stored.layers.items()}
    common = Counter(settings.values()).most_common(1)[0][0] if settings else LoRASettings()
    ranks = {re.escape(name): s.rank for name, s in settings.items() if s.rank != common.rank}
    alphas = {re.escape(name): s.alpha for name, s in settings.items() if s.alpha != common.alpha}
    return common, ranks, alphas


def _module_names(model: LanguageModel) -> set[str]:
    """Return the Hugging Face names of the modules among which PEFT searches for targets."""
    prefixes = tuple(f"{name}." for name, _ in named_adapters(model))
    return {model.hf_name(name) for name, _ in model.named_modules() if not name.startswith(prefixes)}


def _target_modules(layers: set[str], modules: set[str]) -> list[str]:
    """Return the last name components if they select exactly the adapted layers, else full paths."""
    leaves = {name.rpartition(".")[2] for name in layers}
    matches = {name for name in modules if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if matches == layers else sorted(layers)


def read_peft(directory: Path, model: LanguageModel) -> StoredAdapter:
    """Read an adapter that PEFT or `write_peft` wrote. The model determines which weights are fused."""
    config = read_json(directory / CONFIG)
    _check_supported(config, directory)
    experts = {
        model.hf_name(name): expert_shape(model.get_submodule(path), leaf)[0]
        for name in parameter_targets(model)
        for path, _, leaf in [name.rpartition(".")]
    }
    targets = _targeted_parameters(config, list(experts), directory)
    fused = {peft_name: name for name, peft_name in _nested_names(targets).items()}
    layers: dict[str, dict[str, Any]] = {}
    parameters, base_weights = {}, {}
    for key, tensor in read_tensors(directory / WEIGHTS).items():
        name = key.removeprefix(_PREFIX)
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is not None:
            path = name.removesuffix(f".{part}")
            layer = layers.setdefault(fused.get(path, path), {})
            layer |= {_PARTS[part]: tensor, "embedding": part.startswith("lora_embedding")}
        elif name == SCORE and is_classifier(directory):
            continue  # the head is read from whet's own file
        elif name.endswith(".base_layer.weight"):  # PEFT stores an adapted embedding's base weight
            base_weights[name.replace(".base_layer.", ".")] = tensor
        else:
            parameters[name] = tensor
    default = read_peft_settings(directory)
    variant = default.variant
    expected = {"embedding", "a", "b", "magnitude"} if variant == "dora" else {"embedding", "a", "b"}
    incomplete = [name for name, parts in layers.items() if parts.keys() != expected]
    if incomplete:
        raise ModelError(f"{directory / WEIGHTS}: the adapter of {', '.join(incomplete[:4])} is incomplete")
    for module in config.get("modules_to_save") or ():
        if module == SCORE.partition(".")[0] and is_classifier(directory):
            continue
        if not any(f"{module}." in name for name in parameters):
            raise ModelError(
                f"{directory / WEIGHTS} does not contain {module}, which {CONFIG} lists in modules_to_save"
            )
    with invalid_input_errors(f"{directory / CONFIG} is invalid"):
        settings = {name: _layer_settings(config, name, default).validated() for name in layers}
    stored = {
        name: StoredLayer(settings[name], **parts, experts=experts.get(name, 0))
        for name, parts in layers.items()
    }
    return StoredAdapter(stored, parameters, base_weights, config.get("base_model_name_or_path"))


def read_peft_settings(directory: Path) -> LoRASettings:
    """Read the settings of the layers that no pattern of adapter_config.json matches."""
    config = read_json(directory / CONFIG)
    _check_supported(config, directory)
    variant = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    with invalid_input_errors(f"{directory / CONFIG} is invalid"):
        return LoRASettings(
            int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0.0), variant
        ).validated()


def _targeted_parameters(
    config: dict[str, Any], known: list[str], directory: Path
) -> list[str]:  # Any: JSON values
    """Return the fused weights that target_parameters selects."""
    targets = config.get("target_parameters") or ()
    matches = [name for name in known if any(name == t or name.endswith(f".{t}") for t in targets)]
    missing = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in matches)]
    if missing:
        raise ModelError(
            f"{directory / CONFIG}: target_parameters {missing} are not fused experts of this model"
        )
    return matches


def _layer_settings(
    config: dict[str, Any], name: str, default: LoRASettings
) -> LoRASettings:  # Any: JSON values
    def lookup(key: str, fallback: float) -> float:
        patterns = config.get(key) or {}
        matches = (value for p, value in patterns.items() if re.match(rf"(.*\.)?({p})$", name))
        return float(next(matches, fallback))

    rank, alpha = int(lookup("rank_pattern", default.rank)), lookup("alpha_pattern", default.alpha)
    return replace(default, rank=rank, alpha=alpha)


def _check_supported(config: dict[str, Any], directory: Path) -> None:  # Any: JSON values
    path = directory / CONFIG
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type {config.get('peft_type')!r} is not LORA", hint="whet supports LoRA and DoRA"
        )
    for key in _UNSUPPORTED_SETTINGS:
        if config.get(key):
            raise ModelError(f"{path}: {key}={config[key]!r} is not supported")
    if config.get("use_dora") and config.get("use_rslora"):
        raise ModelError(f"{path}: use_dora combined with use_rslora is not supported")
    if config.get("init_lora_weights", True) not in _SUPPORTED_INITS:
        raise ModelError(
            f"{path}: init_lora_weights={config['init_lora_weights']!r} is not supported",
            hint="save it with PEFT as a plain LoRA (path_initial_model_for_weight_conversion)",
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias={config['bias']!r} is not supported")
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ModelError(f"{path} has no {key!r}")
