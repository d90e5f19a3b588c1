"""Convert the metadata of a GGUF file to config.json: the model that llama.cpp would compute."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.errors import ModelError
from whet.model_io.gguf.architectures import ARCHITECTURES, Architecture, Field
from whet.model_io.gguf.tensor_names import ROPE_DIVISORS

Config = dict[str, Any]  # Any: the values of a config.json


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about its model: the metadata, and the shapes and values of its tensors."""

    source: str
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    array: Callable[[str], NDArray[np.float32]]

    def get(self, architecture: Architecture, key: str) -> object:
        """Return the value of a key of the architecture, or None."""
        return self.metadata.get(f"{architecture.name}.{key}")

    def integer(self, architecture: Architecture, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(architecture, key)
        value = default if value is None else value
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one entry per layer; these models have the same value in every layer
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{architecture.name}.{key} is {format_value(value)}, not a positive integer")
        return value

    def number(self, architecture: Architecture, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(architecture, key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{architecture.name}.{key} is {format_value(value)}, not a positive number")
        return float(value)

    def error(self, problem: str, hint: str | None = None) -> ModelError:
        """Return an error about this file."""
        return ModelError(f"{self.source}: {problem}", hint=hint)


def format_value(value: object) -> str:
    """Return a metadata value for a message."""
    return "missing" if value is None else repr(value)[:60]


def find_architecture(header: Header) -> Architecture:
    """Return the architecture of a file, or raise ModelError if it is not supported."""
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{header.source} is a GGUF {kind}, not a model")
    name = header.metadata.get("general.architecture")
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    for architecture in ARCHITECTURES:
        if architecture.name == name and has_experts == any(
            field.key == "expert_count" for field in architecture.fields
        ):
            return architecture
    supported = ", ".join(dict.fromkeys(architecture.name for architecture in ARCHITECTURES))
    experts = " with experts" if has_experts else ""
    raise header.error(
        f"the architecture {format_value(name)}{experts} is not supported in GGUF files",
        hint=f"supported: {supported}; use the model's safetensors instead",
    )


def read_config(header: Header, architecture: Architecture) -> Config:
    """Return the config.json of a file."""
    if "token_embd.weight" not in header.shapes:
        raise header.error("tensor token_embd.weight is missing")
    layers = header.integer(architecture, "block_count")
    if layers > len(header.shapes):
        raise header.error(
            f"the metadata has {layers} layers, but there are only {len(header.shapes)} tensors"
        )
    config: Config = {
        "model_type": architecture.family,
        "vocab_size": header.shapes["token_embd.weight"][0],
        "tie_word_embeddings": architecture.head == "tied"
        or (architecture.head == "optional" and "output.weight" not in header.shapes),
        **{field.config_key: _read_field(header, architecture, field) for field in architecture.fields},
        **architecture.fixed,
    }
    if architecture.optional_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in header.shapes
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.shapes
    if architecture.family == "gpt2":  # it has neither RoPE nor windows
        return config
    config["head_dim"] = _read_head_size(header, architecture, config)
    if architecture.wide_layers:
        is_wide = layers == architecture.wide_layers
        size = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
        config["query_pre_attn_scalar"] = size
    if architecture.window_period:
        config |= _read_windows(header, architecture, config)
    config |= _read_exceptions(header, architecture, config)
    return config | _read_rope(header, architecture, head_dim=config["head_dim"])


def _read_exceptions(header: Header, architecture: Architecture, config: Config) -> Config:
    """Return the fields that only one family has in this form."""
    match architecture.family:
        case "granite" if config["attention_multiplier"] == 0:  # as without the key
            return {"attention_multiplier": config["head_dim"] ** -0.5}
        case "gemma3_text" if config["final_logit_softcapping"] == 0:
            return {"final_logit_softcapping": None}
        case "olmoe":  # llama.cpp's norm of the keys has the size of the queries
            return {"num_key_value_heads": config["num_attention_heads"]}
        case "phi3":  # llama.cpp ignores the window, but the original model has it
            key = "attention.sliding_window"
            has_window = header.get(architecture, key) not in (None, 0)
            return {"sliding_window": header.integer(architecture, key) if has_window else None}
        case _:
            return {}


def _read_field(header: Header, architecture: Architecture, field: Field) -> float:
    if field.default is not None and header.get(architecture, field.key) in (None, field.default):
        return field.default
    if field.config_key == "num_key_value_heads":
        return header.integer(architecture, field.key, header.integer(architecture, "attention.head_count"))
    if issubclass(field.number, int):
        return header.integer(architecture, field.key)
    return header.number(architecture, field.key)


def _read_head_size(header: Header, architecture: Architecture, config: Config) -> int:
    hidden, heads, kv_heads = (
        int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    usual = max(hidden // heads, 1)
    rotary = header.integer(architecture, "rope.dimension_count", usual)
    size = header.integer(architecture, "attention.key_length", rotary)
    if rotary != size or header.integer(architecture, "attention.value_length", size) != size:
        raise header.error(
            f"rotary, key and value sizes differ, but a {architecture.family} model needs equal ones"
        )
    if size % 2 or heads % kv_heads:
        raise header.error(f"{heads} heads of size {size} cannot share {kv_heads} key/value heads")
    return size if architecture.any_head_size else usual


def _read_windows(header: Header, architecture: Architecture, config: Config) -> Config:
    """Return the layer types. The pattern is a list with one flag per layer, or the period of full layers."""
    key, layers = "attention.sliding_window_pattern", int(config["num_hidden_layers"])
    pattern = header.get(architecture, key)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise header.error(f"{architecture.name}.{key} has {len(pattern)} entries for {layers} layers")
        is_local = [bool(entry) for entry in pattern]
    else:
        period = header.integer(architecture, key, architecture.window_period)
        is_local = [layer % period < period - 1 for layer in range(layers)]
    if not config["sliding_window"]:
        is_local = [False] * layers
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "sliding_window": config["sliding_window"] or 4096,  # the config class requires a value
    }


def _read_rope(header: Header, architecture: Architecture, *, head_dim: int) -> Config:
    scaling = _read_scaling(header, architecture)
    theta = header.number(architecture, "rope.freq_base", 10000.0)
    if ROPE_DIVISORS in header.shapes and "llama3" in architecture.scalings:
        llama3 = _read_llama3(header, theta, head_dim=head_dim)
        if llama3 and scaling:
            raise header.error(f"{ROPE_DIVISORS} contradicts {architecture.name}.rope.scaling.type")
        scaling |= llama3
    rope = {"rope_theta": theta, "rope_type": "default", **scaling}
    if not architecture.has_local_rope:
        return {"rope_parameters": rope}
    local = header.number(architecture, "rope.freq_base_swa", 10000.0)
    local_rope = {"rope_theta": local, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local_rope}}


def _read_scaling(header: Header, architecture: Architecture) -> Config:
    """Return linear or YaRN scaling."""
    prefix = f"{architecture.name}.rope.scaling."
    keys = {key.removeprefix(prefix) for key in header.metadata if key.startswith(prefix)}
    has_old_key = header.get(architecture, "rope.scale_linear") is not None and "factor" not in keys
    factor_key = "rope.scale_linear" if has_old_key else "rope.scaling.factor"
    has_factor = header.get(architecture, factor_key) is not None
    kind = header.metadata.get(f"{prefix}type", "linear" if has_factor else "none")
    if kind == "none":
        return {}
    if kind not in architecture.scalings:
        raise _unsupported(header, f"the rope scaling {format_value(kind)}")
    scaling: Config = {"rope_type": kind, "factor": header.number(architecture, factor_key)}
    known = {"type", "factor", "original_context_length", "finetuned"}
    if kind == "yarn":
        known |= {"attn_factor"}
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = header.integer(architecture, key)
        if "attn_factor" in keys:
            factor = header.number(architecture, "rope.scaling.attn_factor")
            scaling["attention_factor"] = factor * default_attention_factor(scaling["factor"])
    if unknown := keys - known:
        raise _unsupported(header, f"{prefix}{min(unknown)}")
    return scaling


def default_attention_factor(factor: float) -> float:
    """Return the factor on the rotated queries and keys that YaRN implies."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _unsupported(header: Header, feature: str) -> ModelError:
    return header.error(f"{feature} is not supported in GGUF files", hint="use the model's safetensors")


def _read_llama3(header: Header, theta: float, *, head_dim: int) -> Config:
    """Infer the parameters of Llama 3's rope scaling from the stored frequency divisors."""
    if header.shapes[ROPE_DIVISORS] != (head_dim // 2,):
        raise header.error(f"tensor {ROPE_DIVISORS} does not have {head_dim // 2} values")
    divisors = header.array(ROPE_DIVISORS)
    if bool((divisors == 1).all()):
        return {}
    low, high = 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # the original context length is 8192, or it follows from a divisor between 1 and the factor; if there is
    # no such divisor, any power of two that reproduces the divisors will do
    largest = float(divisors.max())
    shares = (1 / divisors - 1 / largest) / (1 - 1 / largest)
    implied = (wavelengths * (low + shares * (high - low)))[(divisors > 1) & (divisors < largest)]
    lengths = (8192, *(round(length) for length in implied.tolist()), *(2**power for power in range(24)))
    for original, factor in itertools.product(lengths, (8.0, 32.0, largest)):
        unscaled = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # the share that is kept
        # the tolerance covers the float32 arithmetic of the program that wrote the file
        if np.allclose(divisors, 1 / ((1 - unscaled) / factor + unscaled), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise header.error(
        f"tensor {ROPE_DIVISORS} is not the rope scaling of a Llama 3 model",
        hint="use the model's safetensors, whose config.json specifies the scaling",
    )
