"""One small file a family: config.json to and from ModelSpec, and the tensor names where they differ."""

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whet.error_boundary import wrong_input
from whet.models.families.moe import Parts
from whet.models.spec import ModelSpec

_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "phi3", "gpt2"),
    *("granite", "mixtral", "qwen3_moe", "olmoe", "whet"),
)


class _Families(Mapping[str, ModuleType]):
    """The module of each family by `model_type`, imported when it is asked for."""

    def __getitem__(self, model_type: str) -> ModuleType:
        if model_type not in _TYPES:
            raise KeyError(model_type)
        return importlib.import_module(f"whet.models.families.{model_type.removesuffix('_text')}")

    def __iter__(self) -> Iterator[str]:
        return iter(_TYPES)

    def __len__(self) -> int:
        return len(_TYPES)


FAMILIES = _Families()
_NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True)
class Choice:
    """How a config.json is built: natively when `family` is set, else through transformers, and why."""

    family: ModuleType | None
    reason: str


def choose(config: Mapping[str, Any]) -> Choice:  # Any: the values of a config.json
    """Pick the native family for a config, or say why it goes through transformers."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        return Choice(None, f"{model_type} is not one of whet's own families ({', '.join(FAMILIES)})")
    if config.get("quantization_config"):
        return Choice(None, "its weights are quantised")
    with wrong_input("config.json cannot be understood"):
        why = family.unsupported(config)
    if why is not None:
        return Choice(None, f"whet's own {model_type} does not know {why}")
    return Choice(family, f"whet's own {model_type}")


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec."""
    config: dict[str, Any] = FAMILIES[spec.family].to_config(spec)
    return config


def stored_parts(spec: ModelSpec, name: str) -> Parts | None:
    """The tensors that the family's files hold instead of this parameter, where they do."""
    parts = getattr(FAMILIES[spec.family], "stored_parts", None)
    return None if parts is None else parts(spec, name)


def is_transposed(family: ModuleType, name: str) -> bool:
    """Whether the family's files hold this parameter as [in, out] instead of [out, in]."""
    return bool(getattr(family, "TRANSPOSED", _NOTHING).search(name))


def is_buffer(family: ModuleType, name: str) -> bool:
    """Whether a tensor in the family's files is derived, and never read."""
    return name.endswith("rotary_emb.inv_freq") or bool(getattr(family, "BUFFERS", _NOTHING).search(name))
