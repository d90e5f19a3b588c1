"""One small file a family: config.json to and from ModelSpec, and the tensor names where they differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whet.models.families import llama
from whet.models.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {module.MODEL_TYPE: module for module in (llama,)}


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
    if (why := family.unsupported(config)) is not None:
        return Choice(None, f"whet's own {model_type} does not know {why}")
    return Choice(family, f"whet's own {model_type}")


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec."""
    config: dict[str, Any] = FAMILIES[spec.family].to_config(spec)
    return config
