"""GGUF files in: a llama.cpp model becomes a Hugging Face model directory, once.

The header is read here and not with the gguf package's reader: that one trusts the counts a file states (an array
longer than the file makes it loop without end) and needs seconds for the token list of a small model.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from whet.errors import ModelError
from whet.models.gguf_tokenizer import build_tokenizer
from whet.storage import new_directory, write_json, write_safetensors, write_text

ARCHITECTURES = ("llama",)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
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
            values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which cannot be read",
                hint="get the model in another quantisation, such as Q8_0, Q4_K or F16",
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape)


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
        return ModelError(
            f"{self.path} is damaged or cut short: {what}", hint="download or copy the file again"
        )

    def integer(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

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
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self._array(nesting + 1)
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            return _short(code, struct.unpack(code, self.take(struct.calcsize(code)))[0])
        raise self.error(f"unknown value type {kind} at offset {self.position}")

    def _array(self, nesting: int) -> list[object]:
        kind = self.integer("I")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            width = struct.calcsize("<" + code)
            count = self.count(least_bytes_each=width)
            return list(struct.unpack(f"<{count}{code}", self.take(count * width)))
        return [self.value(kind, nesting=nesting) for _ in range(self.count(least_bytes_each=8))]


def _short(code: str, value: object) -> object:
    """A float32 as the shortest decimal that names it, so that 1e-5 reads as 1e-5 in config.json."""
    return float(str(np.float32(value))) if code == "<f" and isinstance(value, float) else value


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
    cursor.take(len(_MAGIC))
    version = cursor.integer("I")
    if version not in _VERSIONS:
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
    return GgufFile(path, metadata, dict(_tensors(cursor, tensor_count, metadata)), data)


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> Iterator[tuple[str, GgufTensor]]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.error(f"general.alignment is {alignment!r}")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string()
        if name in entries:
            raise cursor.error(f"tensor {name} appears twice")
        dimensions = cursor.integer("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
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
                f"tensor {name} should have {size} bytes at {start}, the file has {len(cursor.data)} in all"
            )
        yield name, GgufTensor(shape, kind, start, size)


@dataclass(frozen=True)
class _Llama:
    """The sizes of a llama model, and which optional tensors it has."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool


@dataclass(frozen=True)
class _Slot:
    """Where a GGUF tensor goes: its Hugging Face name, its shape, and the heads its rows are grouped in."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def convert_gguf(source: Path, target: Path) -> None:
    """Write the Hugging Face model directory `target`, in float32, from the GGUF file `source`."""
    file = read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source}: the architecture {architecture!r} cannot be read from GGUF",
            hint=f"known here: {', '.join(ARCHITECTURES)}; use the model's safetensors instead",
        )
    sizes = _sizes(file)
    slots = _slots(sizes)
    _check_tensors(file, slots)
    config = _config(file, sizes)
    tokenizer, tokenizer_config = build_tokenizer(file.metadata, where=str(source), vocab_size=sizes.vocab)
    tokens = _token_ids(file, sizes)
    with new_directory(target) as staging:
        write_safetensors(staging / "model.safetensors", _weights(file, slots))
        write_json(staging / "config.json", config | tokens)
        write_json(staging / "generation_config.json", {"_from_model_config": True} | tokens)
        write_text(staging / "tokenizer.json", tokenizer.to_str(pretty=True))
        write_json(staging / "tokenizer_config.json", tokenizer_config)


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]  # a list with one entry a layer; only models with equal layers are llama
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


def _sizes(file: GgufFile) -> _Llama:
    hidden = _integer(file, "llama.embedding_length")
    heads = _integer(file, "llama.attention.head_count")
    rotary = _integer(file, "llama.rope.dimension_count", max(hidden // heads, 1))
    head_dim = _integer(file, "llama.attention.key_length", rotary)
    layers = _integer(file, "llama.block_count")
    kv_heads = _integer(file, "llama.attention.head_count_kv", heads)
    if rotary != head_dim or _integer(file, "llama.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotary, key and value sizes differ, which a llama model cannot have")
    if head_dim % 2 or heads % kv_heads:
        raise ModelError(f"{file.path}: {heads} heads of {head_dim} cannot share {kv_heads} key/value heads")
    if file.metadata.get("llama.expert_count", 0) not in (0, None):
        raise ModelError(f"{file.path}: llama models with experts cannot be read from GGUF")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    if layers > len(file.tensors):
        raise ModelError(
            f"{file.path}: {layers} layers are announced, but the tensors of blk.0 on are missing"
        )
    return _Llama(
        layers=layers,
        hidden=hidden,
        feed_forward=_integer(file, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=file.tensors["token_embd.weight"].shape[0],
        tied="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def _slots(sizes: _Llama) -> dict[str, _Slot]:
    """Every tensor the model must have, by its GGUF name."""
    hidden, inner = sizes.hidden, sizes.feed_forward
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    slots = {
        "token_embd.weight": _Slot("model.embed_tokens.weight", (sizes.vocab, hidden)),
        "output_norm.weight": _Slot("model.norm.weight", (hidden,)),
    }
    if not sizes.tied:
        slots["output.weight"] = _Slot("lm_head.weight", (sizes.vocab, hidden))
    linear = {
        "attn_q": ("self_attn.q_proj", (query, hidden), sizes.heads, sizes.attention_bias),
        "attn_k": ("self_attn.k_proj", (key, hidden), sizes.kv_heads, sizes.attention_bias),
        "attn_v": ("self_attn.v_proj", (key, hidden), 0, sizes.attention_bias),
        "attn_output": ("self_attn.o_proj", (hidden, query), 0, sizes.attention_bias),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), 0, sizes.mlp_bias),
        "ffn_up": ("mlp.up_proj", (inner, hidden), 0, sizes.mlp_bias),
        "ffn_down": ("mlp.down_proj", (hidden, inner), 0, sizes.mlp_bias),
    }
    for layer in range(sizes.layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        slots[f"{theirs}.attn_norm.weight"] = _Slot(f"{ours}.input_layernorm.weight", (hidden,))
        slots[f"{theirs}.ffn_norm.weight"] = _Slot(f"{ours}.post_attention_layernorm.weight", (hidden,))
        for name, (module, shape, rotary_heads, bias) in linear.items():
            slots[f"{theirs}.{name}.weight"] = _Slot(f"{ours}.{module}.weight", shape, rotary_heads)
            if bias:
                slots[f"{theirs}.{name}.bias"] = _Slot(f"{ours}.{module}.bias", shape[:1], rotary_heads)
    return slots


def _optional(name: str) -> bool:
    """Whether a tensor may be absent: models with biases on q, k and v often have none on the output."""
    return name.endswith(".attn_output.bias")


def _check_tensors(file: GgufFile, slots: Mapping[str, _Slot]) -> None:
    for name, slot in slots.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            if _optional(name):
                continue
            raise ModelError(f"{file.path}: tensor {name} is missing")
        if tensor.shape != slot.shape:
            raise ModelError(
                f"{file.path}: tensor {name} is {list(tensor.shape)}; its metadata asks for {list(slot.shape)}"
            )
    unknown = sorted(file.tensors.keys() - slots.keys() - {"rope_freqs.weight"})
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} is not part of a llama model ({len(unknown)} such)",
            hint="the file is of a variant that cannot be read; use the model's safetensors instead",
        )


def _weights(file: GgufFile, slots: Mapping[str, _Slot]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, slot in slots.items():
        if name not in file.tensors:
            weights[slot.name] = torch.zeros(slot.shape)
            continue
        values = file.array(name)
        if slot.rotary_heads:
            values = _split_rotary_pairs(values, slot.rotary_heads)
        # A float32 tensor is still a view of the file, which torch must not be given to write into.
        weights[slot.name] = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    return weights


def _split_rotary_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of query and key rows: it keeps rotary pairs side by side, Hugging Face half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _token_ids(file: GgufFile, sizes: _Llama) -> dict[str, int | list[int]]:
    """The begin, end and padding tokens, as config.json names them."""
    ids: dict[str, int | list[int]] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(value, int) and 0 <= value < sizes.vocab:
            ids[f"{ours}_token_id"] = value
    return ids


def _config(file: GgufFile, sizes: _Llama) -> dict[str, object]:
    rope = _rope(file, sizes)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _integer(file, "llama.context_length"),
        "rms_norm_eps": _number(file, "llama.attention.layer_norm_rms_epsilon"),
        "initializer_range": 0.02,
        "attention_bias": sizes.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": sizes.mlp_bias,
        "tie_word_embeddings": sizes.tied,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # where readers of the older layout look
        "use_cache": True,
    }


def _rope(file: GgufFile, sizes: _Llama) -> dict[str, object]:
    return {"rope_theta": _number(file, "llama.rope.freq_base", 10000.0), "rope_type": "default"}
