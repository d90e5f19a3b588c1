"""Convert a GGUF file of llama.cpp to a Hugging Face model directory.

This module parses the header itself, because the gguf package's reader trusts the counts in the file (an
array longer than the file makes it loop forever) and needs seconds for the token list of a small model.
"""

import itertools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from whet.errors import ModelError
from whet.model_io.gguf.layout import ALIGNMENT, ARRAY, SCALARS, STRING, Slot, slots_of, split_rotary_pairs
from whet.model_io.gguf.tokenizer_reader import build_tokenizer
from whet.storage import create_directory_atomically, write_json, write_safetensors, write_text

ARCHITECTURES = ("llama",)

_MAGIC = b"GGUF"
_MAX_NESTING = 4  # of arrays: no known file uses more, and a malicious file could exhaust the stack


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file: its row-major shape, its type, and the offset and number of its bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose sizes and offsets have all been checked against the length of the file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    def array(self, name: str) -> NDArray[np.float32]:
        """Return a tensor in float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, count=tensor.size, offset=tensor.start)
        try:
            with np.errstate(all="ignore"):  # non-finite values are rejected below
                values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which is not supported",
                hint="use another quantization of the model, such as Q8_0, Q4_K or F16",
            ) from error
        weights = np.asarray(values, dtype=np.float32).reshape(tensor.shape)
        if not (np.isfinite(weights.min()) and np.isfinite(weights.max())):
            raise ModelError(
                f"{self.path}: tensor {name} has NaN or infinite values",
                hint="the file is corrupt: download or copy it again",
            )
        return weights


class _Cursor:
    """Reads the header sequentially, and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def read(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise self.error(
                f"the header has {size} bytes at offset {self.position}, past the end of the file"
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def error(self, problem: str) -> ModelError:
        hint = "download or copy the file again"
        return ModelError(f"{self.path} is corrupt or truncated: {problem}", hint=hint)

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))[0]
        # the shortest decimal that identifies a float32, so that config.json has 1e-05 for 1e-5
        return float(str(np.float32(value))) if code == "f" else value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def count(self, *, min_entry_bytes: int) -> int:
        """Read a number of entries, and raise if the rest of the file is too short for them."""
        count = self.integer("Q")
        if count * min_entry_bytes > len(self.data) - self.position:
            raise self.error(f"{count} entries at offset {self.position} do not fit into the file")
        return count

    def string(self) -> str:
        raw = self.read(self.integer("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the text before offset {self.position} is not UTF-8") from error

    def value(self, kind: int, *, nesting: int = 0) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and nesting < _MAX_NESTING:
            return self._array(nesting + 1)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        raise self.error(f"unknown value type {kind} at offset {self.position}")

    def _array(self, nesting: int) -> list[object]:
        kind = self.integer("I")
        if kind in SCALARS:
            code = SCALARS[kind]
            width = struct.calcsize("<" + code)
            count = self.count(min_entry_bytes=width)
            return list(struct.unpack(f"<{count}{code}", self.read(count * width)))
        return [self.value(kind, nesting=nesting) for _ in range(self.count(min_entry_bytes=8))]


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check its header. Tensors are read later from the memory-mapped file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file: it does not start with 'GGUF'",
                    hint="give a .gguf file or a Hugging Face model directory",
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, data)
    cursor.position = len(_MAGIC)
    version = cursor.integer("I")
    if version not in (2, 3):
        raise ModelError(
            f"{path} is GGUF version {version}, but only little-endian versions 2 and 3 are supported",
            hint="convert the model again with a current llama.cpp",
        )
    tensor_count = cursor.count(min_entry_bytes=24)
    metadata_count = cursor.count(min_entry_bytes=13)
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"the key {key} appears twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    tensors = dict(_read_tensor_infos(cursor, tensor_count, metadata))
    ordered = sorted(tensors, key=lambda name: tensors[name].start)
    for before, after in itertools.pairwise(ordered):
        if tensors[before].start + tensors[before].size > tensors[after].start:
            raise cursor.error(f"tensors {before} and {after} overlap")
    return GgufFile(path, metadata, tensors, data)


def _read_tensor_infos(
    cursor: _Cursor, count: int, metadata: Mapping[str, object]
) -> Iterator[tuple[str, GgufTensor]]:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.error(f"general.alignment is {alignment!r}")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string()
        if name in entries:
            raise cursor.error(f"tensor {name} appears twice")
        dimensions = cursor.integer("I")
        if not 1 <= dimensions <= 4:
            raise cursor.error(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(cursor.integer("Q") for _ in range(dimensions))[
            ::-1
        ]  # the file has the fastest dimension first
        entries[name] = (shape, cursor.integer("I"), cursor.integer("Q"))
    data_start = -(-cursor.position // alignment) * alignment
    for name, (shape, kind_number, offset) in entries.items():
        try:
            kind = GGMLQuantizationType(kind_number)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise cursor.error(f"tensor {name} has the unknown type {kind_number}") from error
        if shape[-1] % block_values:
            raise cursor.error(f"tensor {name} of shape {list(shape)} cannot be stored as {kind.name}")
        start, size = data_start + offset, math.prod(shape) // block_values * block_bytes
        if not 0 < size <= len(cursor.data) - start:
            raise cursor.error(
                f"tensor {name} has {size} bytes at offset {start}, but the file has {len(cursor.data)} bytes"
            )
        if offset % alignment:
            raise cursor.error(f"the offset {offset} of tensor {name} is not a multiple of {alignment}")
        yield name, GgufTensor(shape, kind, start, size)


def convert_gguf(source: Path, target: Path) -> None:
    """Write the Hugging Face model directory `target`, in float32, from the GGUF file `source`."""
    file = read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source}: the architecture {_format_value(architecture)} is not supported in GGUF files",
            hint=f"supported: {', '.join(ARCHITECTURES)}; use the model's safetensors instead",
        )
    config = _read_config(file)
    slots = slots_of(config)
    _check_tensors(file, slots)
    vocab_size, max_length = config["vocab_size"], config["max_position_embeddings"]
    built = build_tokenizer(file.metadata, source=str(source), vocab_size=vocab_size, max_length=max_length)
    with create_directory_atomically(target) as staging:
        write_safetensors(staging / "model.safetensors", _read_weights(file, slots))
        write_json(staging / "config.json", config | built.ids)
        write_json(staging / "generation_config.json", built.ids)
        write_text(staging / "tokenizer.json", built.tokenizer.to_str(pretty=True))
        write_json(staging / "tokenizer_config.json", built.config)


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]  # one entry per layer; a llama model has the same value in every layer
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file.path}: {key} is {_format_value(value)}, not a positive integer")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file.path}: {key} is {_format_value(value)}, not a positive number")
    return float(value)


def _format_value(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _read_config(file: GgufFile) -> dict[str, Any]:  # Any: the values of a config.json
    hidden = _integer(file, "llama.embedding_length")
    heads = _integer(file, "llama.attention.head_count")
    kv_heads = _integer(file, "llama.attention.head_count_kv", heads)
    rotary = _integer(file, "llama.rope.dimension_count", max(hidden // heads, 1))
    head_dim = _integer(file, "llama.attention.key_length", rotary)
    if rotary != head_dim or _integer(file, "llama.attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{file.path}: rotary, key and value sizes differ, but a llama model needs equal ones"
        )
    if head_dim % 2 or heads % kv_heads:
        raise ModelError(
            f"{file.path}: {heads} heads of size {head_dim} cannot share {kv_heads} key/value heads"
        )
    if file.metadata.get("llama.expert_count"):
        raise ModelError(f"{file.path}: llama models with experts are not supported in GGUF files")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    layers = _integer(file, "llama.block_count")
    if layers > len(file.tensors):
        raise ModelError(
            f"{file.path}: the metadata has {layers} layers, but there are only {len(file.tensors)} tensors"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "llama.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _integer(file, "llama.context_length"),
        "rms_norm_eps": _number(file, "llama.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_read_rope(file, head_dim),
    }


def _read_rope(file: GgufFile, head_dim: int) -> dict[str, object]:
    """Return the rope settings for config.json, in the current and in the previous layout."""
    prefix = "llama.rope.scaling."
    keys = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    old_key = "llama.rope.scale_linear"
    factor_key = old_key if old_key in file.metadata and "factor" not in keys else prefix + "factor"
    kind = file.metadata.get(prefix + "type", "linear" if factor_key in file.metadata else "none")
    theta = _number(file, "llama.rope.freq_base", 10000.0)
    scaling: dict[str, object] = {}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": _number(file, factor_key)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _integer(file, prefix + "original_context_length")
    unknown = keys - {"type", "factor", "original_context_length", "finetuned"}
    if kind not in ("none", "linear", "yarn") or (scaling and unknown):
        feature = f"{prefix}{min(unknown)}" if scaling else f"the rope scaling {_format_value(kind)}"
        raise ModelError(
            f"{file.path}: {feature} is not supported in GGUF files", hint="use the model's safetensors"
        )
    if "rope_freqs.weight" in file.tensors:
        llama3 = _llama3_scaling(file, theta, head_dim=head_dim)
        if llama3 and scaling:
            raise ModelError(f"{file.path}: rope_freqs.weight contradicts {prefix}type={kind}")
        scaling |= llama3
    rope = {"rope_theta": theta, "rope_type": "default"} | scaling
    return {"rope_parameters": rope, "rope_theta": theta, "rope_scaling": rope if scaling else None}


def _llama3_scaling(file: GgufFile, theta: float, *, head_dim: int) -> dict[str, object]:
    """Infer the parameters of Llama 3's rope scaling from the stored frequency divisors."""
    if file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: tensor rope_freqs.weight does not have {head_dim // 2} values")
    divisors = file.array("rope_freqs.weight")
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
    raise ModelError(
        f"{file.path}: tensor rope_freqs.weight is not the rope scaling of a Llama 3 model",
        hint="use the model's safetensors, whose config.json specifies the scaling",
    )


def _check_tensors(file: GgufFile, slots: Mapping[str, Slot]) -> None:
    for name, slot in slots.items():
        tensor = file.tensors.get(name)
        if tensor is None and not _zero_when_absent(name):
            raise ModelError(f"{file.path}: tensor {name} is missing")
        if tensor is not None and tensor.shape != slot.shape:
            raise ModelError(
                f"{file.path}: tensor {name} is {list(tensor.shape)}, but the metadata requires "
                f"{list(slot.shape)}"
            )
    unknown = sorted(file.tensors.keys() - slots.keys() - {"rope_freqs.weight"})
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} is not part of a llama model ({len(unknown)} unknown tensors)",
            hint="this variant is not supported in GGUF files; use the model's safetensors instead",
        )


def _zero_when_absent(name: str) -> bool:
    """Return whether a missing tensor is zero.

    Models with biases on q, k and v often have none on the output, but Hugging Face's llama needs all four.
    """
    return name.endswith(".attn_output.bias")


def _read_weights(file: GgufFile, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, slot in slots.items():
        if name not in file.tensors:
            weights[slot.name] = torch.zeros(slot.shape)
            continue
        values = file.array(name)
        if slot.rotary_heads:
            values = split_rotary_pairs(values, slot.rotary_heads)
        # a float32 array is still a view of the read-only file, so torch needs a writable copy
        weights[slot.name] = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    return weights
