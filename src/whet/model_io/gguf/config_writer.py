"""Convert a spec to the metadata of a GGUF file, and refuse what llama.cpp would compute differently."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.errors import ModelError
from whet.model_io.gguf.architectures import ARCHITECTURES, Architecture
from whet.model_io.gguf.config_reader import Header, default_attention_factor, read_config
from whet.model_io.gguf.tensor_names import ROPE_DIVISORS, build_skeleton, tensor_slots
from whet.models.families import FAMILIES
from whet.models.rope import inverse_frequencies
from whet.models.spec import (
    AttentionSpec,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    RopeSpec,
    YarnRopeScaling,
)

# families without a row of their own: llama.cpp reads them as a llama, as long as they have no window
_AS_LLAMA = ("mistral",)


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """A model as a GGUF file describes it: its architecture, its metadata and its extra tensors."""

    architecture: Architecture
    spec: ModelSpec  # in the family of the architecture
    metadata: dict[str, object]
    extra: dict[str, NDArray[np.float32]]  # tensors that are no parameters


def describe_model(spec: ModelSpec) -> GgufModel:
    """Return the model as GGUF describes it, or raise ModelError if llama.cpp would compute another one."""
    candidates = [each for each in ARCHITECTURES if each.family == spec.family]
    if spec.family in _AS_LLAMA:
        candidates = [each for each in ARCHITECTURES if each.family == "llama"]
    problems = []
    for architecture in candidates or ARCHITECTURES:  # a custom decoder may equal any family
        try:
            model = _describe(dataclasses.replace(spec, family=architecture.family), architecture)
            problem = _find_difference(model)
        except ModelError as error:  # not a spec of this family at all
            problem = error.message
        if problem is None:
            return model
        problems.append(f"{problem} in its architecture {architecture.name}")
    reason = problems[0] if candidates else "no architecture of GGUF has the same layers"
    raise ModelError(
        f"this {spec.family!r} model cannot be exported to GGUF: {reason}",
        hint=_hint(spec),
    )


def _hint(spec: ModelSpec) -> str:
    windows = [attention.window for attention in spec.attention_specs if attention.window is not None]
    if windows and spec.family in ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"):
        return (
            "llama.cpp ignores the window; to use the model with texts of up to "
            f"{min(windows)} tokens, set sliding_window to null in its config.json"
        )
    return "export it as a Hugging Face directory: --to hf"


def _describe(spec: ModelSpec, architecture: Architecture) -> GgufModel:
    config = FAMILIES[spec.family].to_config(spec)
    values: dict[str, object] = {"vocab_size": spec.vocab_size}
    for field in architecture.fields:
        value = config[field.config_key]
        if value is not None:
            values[field.key] = field.number(value)
    extra: dict[str, NDArray[np.float32]] = {}
    attention = spec.blocks[0].grouped_attention
    if spec.positions == "none":
        size = attention.head_dim
        values |= {
            "attention.key_length": size,
            "attention.value_length": size,
            "rope.dimension_count": size,
        }
        rope = _global_rope(spec)
        values |= _rope_metadata(rope)
        if isinstance(rope.scaling, Llama3RopeScaling):
            plain = inverse_frequencies(RopeSpec(theta=rope.theta), size)
            extra[ROPE_DIVISORS] = (plain / inverse_frequencies(rope, size)).numpy()
    windows = [block.grouped_attention.window for block in spec.blocks]
    if any(window is not None for window in windows) and architecture.window_period:
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    else:  # llama.cpp rejects a pattern without windows
        values.pop("attention.sliding_window", None)
    if architecture.has_local_rope:
        values["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    metadata = {f"{architecture.name}.{key}": value for key, value in values.items()}
    return GgufModel(architecture, spec, metadata, extra)


def _global_rope(spec: ModelSpec) -> RopeSpec:
    """Return the RoPE of the layers without a window, or of any layer if all have one."""
    attentions = [block.grouped_attention for block in spec.blocks]
    ropes = [each.rope for each in attentions if each.rope is not None and each.window is None]
    ropes += [each.rope for each in attentions if each.rope is not None]
    return ropes[0] if ropes else RopeSpec()


def _rope_metadata(rope: RopeSpec) -> dict[str, object]:
    """Return the base frequency, and linear or YaRN scaling. Llama 3's scaling is a tensor instead."""
    values: dict[str, object] = {"rope.freq_base": float(rope.theta)}
    match rope.scaling:
        case LinearRopeScaling(factor=factor):
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnRopeScaling() as scaling:
            values |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(scaling.factor),
                "rope.scaling.original_context_length": scaling.original_max_positions,
            }
            default = default_attention_factor(scaling.factor)
            if not math.isclose(scaling.attention_factor, default, rel_tol=1e-6):
                values["rope.scaling.attn_factor"] = scaling.attention_factor / default
    return values


def _find_difference(model: GgufModel) -> str | None:
    """Return what llama.cpp would compute differently from the spec, or None."""
    slots = tensor_slots(build_skeleton(model.spec), model.architecture)
    shapes = {name: slot.shape for name, slot in slots.items()}
    shapes |= {name: values.shape for name, values in model.extra.items()}
    header = Header("the new file", model.metadata, shapes, model.extra.__getitem__)
    config = read_config(header, model.architecture)
    theirs = FAMILIES[model.spec.family].from_config(config)
    ours_flat, theirs_flat = (dict(_flatten(_comparable(spec))) for spec in (model.spec, theirs))
    for path in [*ours_flat, *theirs_flat]:
        ours, other = ours_flat.get(path), theirs_flat.get(path)
        if not _is_close(ours, other):
            return f"GGUF has {path}={_shorten(other)} instead of {_shorten(ours)}"
    return None


def _comparable(spec: ModelSpec) -> dict[str, Any]:  # Any: JSON values
    """Return a description of the spec in which equivalent settings are equal."""
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        fields = dataclasses.asdict(block)
        if isinstance(attention, AttentionSpec):
            window = attention.window
            fields["attention"] |= {
                "scale": attention.head_dim**-0.5 if attention.scale is None else attention.scale,
                "window": None if window is None or window >= spec.max_positions else window,
                "rope": _comparable_rope(attention),
            }
        blocks.append(fields)
    return dataclasses.asdict(spec) | {"blocks": blocks}


def _comparable_rope(attention: AttentionSpec) -> object:
    if attention.rope is None:
        return None
    scaling = attention.rope.scaling
    factor = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0
    return {
        "attention_factor": factor,
        "frequencies": inverse_frequencies(attention.rope, attention.head_dim).tolist(),
    }


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, object]]:  # Any: JSON values
    items: Mapping[str, Any]
    if isinstance(value, dict):
        items = value
    elif isinstance(value, list | tuple):
        items = {str(index): each for index, each in enumerate(value)}
    else:
        yield path, value
        return
    for key, each in items.items():
        yield from _flatten(each, f"{path}.{key}" if path else key)


def _is_close(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-4)  # also covers the rounding to float32
    return first == second


def _shorten(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
