"""whet's native format, for decoders that no other family can describe: the spec as JSON."""

import dataclasses
import types
import typing
from typing import Any

from whet.errors import ModelError
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "whet"
ARCHITECTURE = "WhetDecoder"


def unsupported_feature(config: Config) -> str | None:  # noqa: ARG001 - every family has this signature
    """Return None: every config of this family is supported."""
    return None


def from_config(config: Config) -> ModelSpec:
    """Return the spec that `to_config` wrote."""
    spec = _read(ModelSpec, config.get("spec"), "spec")
    assert isinstance(spec, ModelSpec)
    return spec


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return a config with the spec, and with the sizes that other tools read."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": len(spec.blocks),
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_head,
        "spec": spec.describe(),
    }


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a parameter or module, as in llama."""
    return name if name.startswith("lm_head") else f"model.{name}"


def _read(expected: Any, value: Any, where: str) -> Any:  # Any: a type of the spec, and a JSON value
    """Convert a JSON value to the type of a spec field."""
    options = typing.get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    if value is None and type(None) in options:
        return None
    if typing.get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise ModelError(f"config.json: {where} must be a list")
        [item, _] = typing.get_args(expected)
        return tuple(_read(item, each, f"{where}[{index}]") for index, each in enumerate(value))
    if not isinstance(value, dict):
        plain = tuple(option for option in options if isinstance(option, type))
        if isinstance(value, int) and not isinstance(value, bool) and float in plain:
            value = float(value)
        if type(value) not in plain:
            raise ModelError(f"config.json: {where}={value!r} has the wrong type for a spec")
        return value
    for option in options:
        # the alternatives of a union differ in their fields
        if dataclasses.is_dataclass(option) and _has_fields(option, value):
            hints = typing.get_type_hints(option)
            fields = {name: _read(hints[name], each, f"{where}.{name}") for name, each in value.items()}
            return option(**fields)  # type: ignore[operator]  # a dataclass of the spec
    raise ModelError(f"config.json: {where} has the fields {', '.join(value)}, which match no part of a spec")


def _has_fields(option: Any, value: dict[str, Any]) -> bool:  # Any: a dataclass, JSON values
    """Whether a JSON object has the fields of this dataclass. Fields with a default may be missing."""
    fields = dataclasses.fields(option)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    return required <= value.keys() <= {field.name for field in fields}
