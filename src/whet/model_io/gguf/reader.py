"""GGUF files in: a llama.cpp model becomes a Hugging Face model directory, once.

The header is read here, not with the gguf package's reader: that one trusts the counts a file states (an
array longer than the file makes it loop without end) and needs seconds for the token list of a small model.
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
from whet.storage import new_directory, write_json, write_safetensors, write_text

ARCHITECTURES = ("llama",)

_MAGIC = b"GGUF"
_MAX_NESTING = 4  # arrays in arrays: nothing uses more, and a hostile file could otherwise exhaust the stack


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file: its shape, row-major, and where its bytes lie."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose every size and offset has been checked against the bytes that are there."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    def array(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, count=tensor.size, offset=tensor.start)
        try:
            with np.errstate(all="ignore"):  # what is not finite is refused below
                values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which cannot be read",
                hint="get the model in another quantisation, such as Q8_0, Q4_K or F16",
            ) from error
        weights = np.asarray(values, dtype=np.float32).reshape(tensor.shape)
        if not (np.isfinite(weights.min()) and np.isfinite(weights.max())):
            raise ModelError(
                f"{self.path}: tensor {name} has values that are NaN or infinite",
                hint="the file is damaged: download or copy it again",
            )
        return weights


class _Cursor:
    """Reads the header from front to back and never beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise self.error(f"the header ends {size} bytes after offset {self.position}, past the end")
        self.position += size
        return self.data[self.position - size : self.position]

    def error(self, what: str) -> ModelError:
        hint = "download or copy the file again"
        return ModelError(f"{self.path} is damaged or cut short: {what}", hint=hint)

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        # The shortest decimal that names a float32: 1e-5 shall read 1e-05 in config.json.
        return float(str(np.float32(value))) if code == "f" else value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def count(self, *, least_bytes_each: int) -> int:
        """A number of things to come, refused when the rest of the file could not hold them."""
        count = self.integer("Q")
        if count * least_bytes_each > len(self.data) - self.position:
            raise self.error(f"{count} entries are announced at offset {self.position}")
        return count

    def string(self) -> str:
        raw = self.take(self.integer("Q"))
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
            count = self.count(least_bytes_each=width)
            return list(struct.unpack(f"<{count}{code}", self.take(count * width)))
        return [self.value(kind, nesting=nesting) for _ in range(self.count(least_bytes_each=8))]


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check its header; tensors are read later, from the mapped file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file: it does not begin with 'GGUF'",
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
            f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read",
            hint="convert the model again with a current llama.cpp",
        )
    tensor_count = cursor.count(least_bytes_each=24)
    metadata_count = cursor.count(least_bytes_each=13)
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"the key {key} appears twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    tensors = dict(_tensors(cursor, tensor_count, metadata))
    ordered = sorted(tensors, key=lambda name: tensors[name].start)
    for before, after in itertools.pairwise(ordered):
        if tensors[before].start + tensors[before].size > tensors[after].start:
            raise cursor.error(f"tensors {before} and {after} overlap")
    return GgufFile(path, metadata, tensors, data)


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> Iterator[tuple[str, GgufTensor]]:
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
        shape = tuple(cursor.integer("Q") for _ in range(dimensions))[::-1]  # the file has the fastest first
        entries[name] = (shape, cursor.integer("I"), cursor.integer("Q"))
    data_start = -(-cursor.position // alignment) * alignment
    for name, (shape, kind_number, offset) in entries.items():
        try:
            kind = GGMLQuantizationType(kind_number)
            values_each, bytes_each = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise cursor.error(f"tensor {name} has the unknown type {kind_number}") from error
        if shape[-1] % values_each:
            raise cursor.error(f"tensor {name}, {list(shape)}, cannot be stored as {kind.name}")
        start, size = data_start + offset, math.prod(shape) // values_each * bytes_each
        if not 0 < size <= len(cursor.data) - start:
            raise cursor.error(
                f"tensor {name} has {size} bytes at {start}, the file {len(cursor.data)} in all"
            )
        if offset % alignment:
            raise cursor.error(f"tensor {name} is at {offset}, which is not a multiple of {alignment}")
        yield name, GgufTensor(shape, kind, start, size)


def convert_gguf(source: Path, target: Path) -> None:
    """Write the Hugging Face model directory `target`, in float32, from the GGUF file `source`."""
    file = read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source}: the architecture {_shown(architecture)} cannot be read from GGUF",
            hint=f"known here: {', '.join(ARCHITECTURES)}; use the model's safetensors instead",
        )
    config = _config(file)
    slots = slots_of(config)
    _check_tensors(file, slots)
    vocab_size, max_length = config["vocab_size"], config["max_position_embeddings"]
    built = build_tokenizer(file.metadata, where=str(source), vocab_size=vocab_size, max_length=max_length)
    with new_directory(target) as staging:
        write_safetensors(staging / "model.safetensors", _weights(file, slots))
        write_json(staging / "config.json", config | built.ids)
        write_json(staging / "generation_config.json", built.ids)
        write_text(staging / "tokenizer.json", built.tokenizer.to_str(pretty=True))
        write_json(staging / "tokenizer_config.json", built.config)


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]  # one entry a layer; layers that differ are no llama model
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file.path}: {key} is {_shown(value)}, not a whole number above 0")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file.path}: {key} is {_shown(value)}, not a number above 0")
    return float(value)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _config(file: GgufFile) -> dict[str, Any]:  # Any: the values of a config.json
    hidden = _integer(file, "llama.embedding_length")
    heads = _integer(file, "llama.attention.head_count")
    kv_heads = _integer(file, "llama.attention.head_count_kv", heads)
    rotary = _integer(file, "llama.rope.dimension_count", max(hidden // heads, 1))
    head_dim = _integer(file, "llama.attention.key_length", rotary)
    if rotary != head_dim or _integer(file, "llama.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotary, key and value sizes differ, which a llama model cannot have")
    if head_dim % 2 or heads % kv_heads:
        raise ModelError(f"{file.path}: {heads} heads of {head_dim} cannot share {kv_heads} key/value heads")
    if file.metadata.get("llama.expert_count"):
        raise ModelError(f"{file.path}: llama models with experts cannot be read from GGUF")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    layers = _integer(file, "llama.block_count")
    if layers > len(file.tensors):
        raise ModelError(
            f"{file.path}: {layers} layers are announced, with {len(file.tensors)} tensors in all"
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
        **_rope(file, head_dim),
    }


def _rope(file: GgufFile, head_dim: int) -> dict[str, object]:
    """The rope settings as config.json has them, in today's layout and in the one before it."""
    prefix = "llama.rope.scaling."
    given = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    old = "llama.rope.scale_linear"
    factor = old if old in file.metadata and "factor" not in given else prefix + "factor"
    kind = file.metadata.get(prefix + "type", "linear" if factor in file.metadata else "none")
    theta = _number(file, "llama.rope.freq_base", 10000.0)
    scaling: dict[str, object] = {}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": _number(file, factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _integer(file, prefix + "original_context_length")
    unknown = given - {"type", "factor", "original_context_length", "finetuned"}
    if kind not in ("none", "linear", "yarn") or (scaling and unknown):
        what = f"{prefix}{min(unknown)}" if scaling else f"the rope scaling {_shown(kind)}"
        raise ModelError(f"{file.path}: {what} cannot be read from GGUF", hint="use the model's safetensors")
    if "rope_freqs.weight" in file.tensors:
        found = _llama3_scaling(file, theta, head_dim=head_dim)
        if found and scaling:
            raise ModelError(f"{file.path}: rope_freqs.weight and {prefix}type={kind} contradict each other")
        scaling |= found
    rope = {"rope_theta": theta, "rope_type": "default"} | scaling
    return {"rope_parameters": rope, "rope_theta": theta, "rope_scaling": rope if scaling else None}


def _llama3_scaling(file: GgufFile, theta: float, *, head_dim: int) -> dict[str, object]:
    """The parameters behind the stored frequency divisors, which the file has without them."""
    if file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: tensor rope_freqs.weight does not have {head_dim // 2} values")
    divisors = file.array("rope_freqs.weight")
    if bool((divisors == 1).all()):
        return {}
    low, high = 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # the length that it was made for is 8192, or what a divisor between 1 and the factor says, or any at all
    # that gives these divisors where there is none between
    most = float(divisors.max())
    shares = (1 / divisors - 1 / most) / (1 - 1 / most)
    said = (wavelengths * (low + shares * (high - low)))[(divisors > 1) & (divisors < most)]
    lengths = (8192, *(round(length) for length in said.tolist()), *(2**power for power in range(24)))
    for original, factor in itertools.product(lengths, (8.0, 32.0, most)):
        kept = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # the share not slowed down
        # The tolerance is for the float32 arithmetic of the program that wrote the file.
        if np.allclose(divisors, 1 / ((1 - kept) / factor + kept), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError(
        f"{file.path}: tensor rope_freqs.weight is not the rope scaling of a Llama 3 model",
        hint="use the model's safetensors, whose config.json names the scaling",
    )


def _check_tensors(file: GgufFile, slots: Mapping[str, Slot]) -> None:
    for name, slot in slots.items():
        tensor = file.tensors.get(name)
        if tensor is None and not _zero_when_absent(name):
            raise ModelError(f"{file.path}: tensor {name} is missing")
        if tensor is not None and tensor.shape != slot.shape:
            shapes = f"{list(tensor.shape)}, where the metadata asks for {list(slot.shape)}"
            raise ModelError(f"{file.path}: tensor {name} is {shapes}")
    unknown = sorted(file.tensors.keys() - slots.keys() - {"rope_freqs.weight"})
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} is not part of a llama model ({len(unknown)} such)",
            hint="the file is of a variant that cannot be read; use the model's safetensors instead",
        )


def _zero_when_absent(name: str) -> bool:
    """Models with biases on q, k and v often have none on the output; Hugging Face's llama wants all four."""
    return name.endswith(".attn_output.bias")


def _weights(file: GgufFile, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, slot in slots.items():
        if name not in file.tensors:
            weights[slot.name] = torch.zeros(slot.shape)
            continue
        values = file.array(name)
        if slot.rotary_heads:
            values = split_rotary_pairs(values, slot.rotary_heads)
        # A float32 tensor is still a view of the file, which torch must not be given to write into.
        weights[slot.name] = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    return weights
