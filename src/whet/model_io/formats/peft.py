"""PEFT's layout: adapter_config.json and adapter_model.safetensors, names after `base_model.model.`."""

import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import LoRASettings, StoredLayer, adapted
from whet.adapters.layers.lora_experts import expert_shape, expert_weights, fused_weights
from whet.error_boundary import wrong_input
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
_OF_EXPERTS = ".gate_proj", ".up_proj", ".down_proj"  # where a model has experts as one tensor, PEFT 0.21
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# settings under which the same tensors mean something else
_OTHER_MATH = (
    "use_qalora",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "kasa_config",
)
# the other ways to start change the base weights, which the file does not hold
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def peft_tensors(stored: StoredAdapter) -> dict[str, torch.Tensor]:
    """The tensors under PEFT's names."""
    tensors: dict[str, torch.Tensor] = {}
    nested = _nested([name for name, layer in stored.layers.items() if layer.experts])
    for name, layer in stored.layers.items():
        path = _PREFIX + nested.get(name, name)
        form = "lora_embedding_{}" if layer.embedding else "lora_{}.weight"
        tensors |= {f"{path}.{form.format('A')}": layer.a, f"{path}.{form.format('B')}": layer.b}
        if layer.magnitude is not None:
            tensors[f"{path}.lora_magnitude_vector"] = layer.magnitude
    return tensors | {f"{_PREFIX}{name}": tensor for name, tensor in stored.whole.items()}


def _nested(weights: list[str]) -> dict[str, str]:
    """PEFT's names for adapters of fused weights: those of one module are nested, the last one outermost."""
    modules: dict[str, list[str]] = {}
    for name in weights:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * depth
        for module, names in modules.items()
        for depth, name in enumerate(reversed(names))
    }


def write_peft(directory: Path, model: LanguageModel, stored: StoredAdapter) -> None:
    """Write the files that PEFT loads."""
    usual, ranks, alphas = _common(stored)
    layers = {name for name, layer in stored.layers.items() if not layer.experts}
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if SCORE in stored.whole else "CAUSAL_LM",
        "base_model_name_or_path": stored.origin,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        "lora_dropout": usual.dropout,
        "target_modules": _short_names(layers, _modules(model)),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in stored.whole}) or None,
        "bias": "none",
        "fan_in_fan_out": model.stores_transposed,
        "inference_mode": True,
        "use_dora": usual.variant == "dora",
        "use_rslora": usual.variant == "rslora",
    }
    if taken := sorted(name for name in layers if name.endswith(_OF_EXPERTS) and expert_weights(model)):
        log.warning(
            "PEFT takes adapters of %s and others for those of experts, and loses them: "
            "for other programs, merge this adapter (whet export --to hf)",
            taken[0],
        )
    if experts := sorted(stored.layers.keys() - layers):
        config["target_parameters"] = experts
    write_json(directory / CONFIG, config)
    write_safetensors(directory / WEIGHTS, peft_tensors(stored))


def _common(stored: StoredAdapter) -> tuple[LoRASettings, dict[str, int], dict[str, float]]:
    """The settings most layers have, and the rank and alpha of those that differ."""
    settings = {name: layer.settings for name, layer in stored.layers.items()}
    usual = Counter(settings.values()).most_common(1)[0][0] if settings else LoRASettings()
    ranks = {re.escape(name): s.rank for name, s in settings.items() if s.rank != usual.rank}
    alphas = {re.escape(name): s.alpha for name, s in settings.items() if s.alpha != usual.alpha}
    return usual, ranks, alphas


def _modules(model: LanguageModel) -> set[str]:
    """The modules in which PEFT looks for its targets, by Hugging Face's names."""
    inside = tuple(f"{name}." for name, _ in adapted(model))
    return {model.hf_name(name) for name, _ in model.named_modules() if not name.startswith(inside)}


def _short_names(chosen: set[str], modules: set[str]) -> list[str]:
    """Short names where they select exactly the adapted layers, else whole paths."""
    leaves = {name.rpartition(".")[2] for name in chosen}
    selected = {name for name in modules if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if selected == chosen else sorted(chosen)


def read_peft(directory: Path, model: LanguageModel) -> StoredAdapter:
    """Read what PEFT, or `write_peft`, wrote; the model says which of its weights are fused experts."""
    config = read_json(directory / CONFIG)
    _check_supported(config, directory)
    experts = {
        model.hf_name(name): expert_shape(model.get_submodule(path), leaf)[0]
        for name in fused_weights(model)
        for path, _, leaf in [name.rpartition(".")]
    }
    fused = {theirs: name for name, theirs in _nested(_aimed_at(config, list(experts), directory)).items()}
    layers: dict[str, dict[str, Any]] = {}
    whole, bases = {}, {}
    for full, tensor in read_tensors(directory / WEIGHTS).items():
        name = full.removeprefix(_PREFIX)
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is not None:
            path = name.removesuffix(f".{part}")
            layer = layers.setdefault(fused.get(path, path), {})
            layer |= {_PARTS[part]: tensor, "embedding": part.startswith("lora_embedding")}
        elif name == SCORE and is_classifier(directory):
            continue  # whet reads its own copy
        elif name.endswith(".base_layer.weight"):  # PEFT stores an embedding with its adapter
            bases[name.replace(".base_layer.", ".")] = tensor
        else:
            whole[name] = tensor
    variant = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    expected = {"embedding", "a", "b", "magnitude"} if variant == "dora" else {"embedding", "a", "b"}
    odd = [name for name, parts in layers.items() if parts.keys() != expected]
    if odd:
        raise ModelError(f"{directory / WEIGHTS} does not hold all of the adapter of {', '.join(odd[:4])}")
    for module in config.get("modules_to_save") or ():
        if module == SCORE.partition(".")[0] and is_classifier(directory):
            continue
        if not any(f"{module}." in name for name in whole):
            raise ModelError(f"{directory / WEIGHTS} does not hold {module}, which {CONFIG} says it does")
    with wrong_input(f"{directory / CONFIG} cannot be understood"):
        usual = LoRASettings(
            int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0.0), variant
        )
        settings = {name: _settings(config, name, usual).checked() for name in layers}
    stored = {
        name: StoredLayer(settings[name], **parts, experts=experts.get(name, 0))
        for name, parts in layers.items()
    }
    return StoredAdapter(stored, whole, bases, config.get("base_model_name_or_path"))


def _aimed_at(config: dict[str, Any], known: list[str], directory: Path) -> list[str]:  # Any: JSON values
    """The fused weights that target_parameters means."""
    wanted = config.get("target_parameters") or ()
    found = [name for name in known if any(name == each or name.endswith(f".{each}") for each in wanted)]
    missing = [each for each in wanted if not any(n == each or n.endswith(f".{each}") for n in found)]
    if missing:
        raise ModelError(f"{directory / CONFIG}: target_parameters {missing} are no experts of this model")
    return found


def _settings(config: dict[str, Any], name: str, usual: LoRASettings) -> LoRASettings:  # Any: JSON values
    def own(key: str, otherwise: float) -> float:
        patterns = config.get(key) or {}
        fits = (value for p, value in patterns.items() if re.match(rf"(.*\.)?({p})$", name))
        return float(next(fits, otherwise))

    rank, alpha = int(own("rank_pattern", usual.rank)), own("alpha_pattern", usual.alpha)
    return replace(usual, rank=rank, alpha=alpha)


def _check_supported(config: dict[str, Any], directory: Path) -> None:  # Any: JSON values
    where = directory / CONFIG
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{where}: peft_type {config.get('peft_type')!r} is not LORA", hint="whet reads LoRA and DoRA"
        )
    for key in _OTHER_MATH:
        if config.get(key):
            raise ModelError(f"{where}: {key}={config[key]!r} is not supported")
    if config.get("use_dora") and config.get("use_rslora"):
        raise ModelError(f"{where}: use_dora together with use_rslora is not supported")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise ModelError(
            f"{where}: init_lora_weights={config['init_lora_weights']!r} is not supported",
            hint="save it from PEFT as a plain LoRA (path_initial_model_for_weight_conversion)",
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias={config['bias']!r} is not supported")
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ModelError(f"{where} has no {key!r}")
