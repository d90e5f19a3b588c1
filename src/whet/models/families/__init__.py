"""Native model families, one module each: conversion of config.json and of tensor names."""

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whet.error_boundary import invalid_input_errors
from whet.models.families.moe import Parts
from whet.models.spec import ModelSpec

_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "phi3", "gpt2"),
    *("granite", "mixtral", "qwen3_moe", "olmoe", "whet"),
)


class _Families(Mapping[str, ModuleType]):
    """Maps `model_type` to the module of the family, which is imported on first use."""

    def __getitem__(self, model_type: str) -> ModuleType:
        if model_type not in _MODEL_TYPES:
            raise KeyError(model_type)
        return importlib.import_module(f"whet.models.families.{model_type.removesuffix('_text')}")

    def __iter__(self) -> Iterator[str]:
        return iter(_MODEL_TYPES)

    def __len__(self) -> int:
        return len(_MODEL_TYPES)


FAMILIES = _Families()
_NEVER_MATCHES = re.compile(r"(?!)")


@dataclass(frozen=True)
class FamilyChoice:
    """How to build a model: natively if `family` is set, otherwise through transformers; and the reason."""

    family: ModuleType | None
    reason: str


def choose_family(config: Mapping[str, Any]) -> FamilyChoice:  # Any: the values of a config.json
    """Choose the native family of a config, or state why the model must use transformers."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        return FamilyChoice(None, f"{model_type} is not a native family of whet ({', '.join(FAMILIES)})")
    with invalid_input_errors("config.json is invalid"):
        feature = family.unsupported_feature(config)
    if feature is not None:
        return FamilyChoice(None, f"whet's native {model_type} does not support {feature}")
    return FamilyChoice(family, f"whet's native {model_type}")


def spec_to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec."""
    config: dict[str, Any] = FAMILIES[spec.family].to_config(spec)
    return config


def stored_tensor_names(spec: ModelSpec, name: str) -> Parts | None:
    """Return the names of the tensors that files store instead of this parameter, or None."""
    parts = getattr(FAMILIES[spec.family], "stored_tensor_names", None)
    return None if parts is None else parts(spec, name)


def is_transposed(family: ModuleType, name: str) -> bool:
    """Whether the family's files store this parameter as [in, out] instead of [out, in]."""
    return bool(getattr(family, "TRANSPOSED", _NEVER_MATCHES).search(name))


def is_buffer(family: ModuleType, name: str) -> bool:
    """Whether a tensor in the family's files is a derived buffer, which is not read."""
    return name.endswith("rotary_emb.inv_freq") or bool(
        getattr(family, "BUFFERS", _NEVER_MATCHES).search(name)
    )
