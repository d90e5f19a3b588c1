"""whet's own format, for decoders that no other family can describe: the spec itself, written out."""

import dataclasses
import types
import typing
from typing import Any

from whet.errors import ModelError
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "whet"
ARCHITECTURE = "WhetDecoder"


def unsupported(config: Config) -> str | None:  # noqa: ARG001 - every family has this signature
    """Why this config cannot be built natively: never."""
    return None


def from_config(config: Config) -> ModelSpec:
    """Read the spec that `to_config` wrote."""
    spec = _read(ModelSpec, config.get("spec"), "spec")
    assert isinstance(spec, ModelSpec)
    return spec


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The spec, and the sizes that other tools look for."""
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
    """Names follow llama's."""
    return name if name.startswith("lm_head") else f"model.{name}"


def _read(wanted: Any, value: Any, where: str) -> Any:  # Any: a type of the spec, and a JSON value
    """A JSON value as the type that a field of the spec has."""
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if value is None and type(None) in options:
        return None
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise ModelError(f"config.json: {where} must be a list")
        [item, _] = typing.get_args(wanted)
        return tuple(_read(item, each, f"{where}[{index}]") for index, each in enumerate(value))
    if not isinstance(value, dict):
        plain = tuple(option for option in options if isinstance(option, type))
        if isinstance(value, int) and not isinstance(value, bool) and float in plain:
            value = float(value)
        if type(value) not in plain:
            raise ModelError(f"config.json: {where}={value!r} is not what a spec holds there")
        return value
    for option in options:
        # the descriptions that may stand in one place have different fields
        if dataclasses.is_dataclass(option) and _has_fields(option, value):
            hints = typing.get_type_hints(option)
            fields = {name: _read(hints[name], each, f"{where}.{name}") for name, each in value.items()}
            return option(**fields)  # type: ignore[operator]  # a dataclass of the spec
    raise ModelError(f"config.json: {where} has the fields {', '.join(value)}, which no part of a spec has")


def _has_fields(option: Any, value: dict[str, Any]) -> bool:  # Any: a dataclass, JSON values
    """Whether a JSON object is a description of this kind; what newer versions added has a default."""
    fields = dataclasses.fields(option)
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    return needed <= value.keys() <= {field.name for field in fields}
