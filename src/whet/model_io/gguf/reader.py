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

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.gguf.architectures import Architecture
from whet.model_io.gguf.config_reader import Header, find_architecture, read_config
from whet.model_io.gguf.layout import ALIGNMENT, ARRAY, SCALARS, STRING
from whet.model_io.gguf.tensor_names import (
    ROPE_DIVISORS,
    Slot,
    build_skeleton,
    restore_parameters,
    tensor_slots,
)
from whet.model_io.gguf.tokenizer_reader import build_tokenizer
from whet.models.decoder import Decoder
from whet.models.families import FAMILIES
from whet.storage import create_directory_atomically, write_json, write_safetensors, write_text

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
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    header = Header(str(source), file.metadata, shapes, file.array)
    architecture = find_architecture(header)
    config = read_config(header, architecture)
    with invalid_input_errors(f"{source}: the metadata is invalid"):
        spec = FAMILIES[architecture.family].from_config(config)
        model = build_skeleton(spec)
    slots = tensor_slots(model, architecture)
    _check_tensors(file, slots, architecture)
    built = build_tokenizer(
        file.metadata, source=str(source), vocab_size=spec.vocab_size, max_length=spec.max_positions
    )
    written = {**FAMILIES[architecture.family].to_config(spec), "dtype": "float32", **built.ids}
    if "residual_multiplier" in config:  # whet runs a factor other than 1 through transformers
        written["residual_multiplier"] = config["residual_multiplier"]
    with create_directory_atomically(target) as staging:
        write_safetensors(staging / "model.safetensors", _read_weights(file, model, slots))
        write_json(staging / "config.json", written)
        write_json(staging / "generation_config.json", built.ids)
        write_text(staging / "tokenizer.json", built.tokenizer.to_str(pretty=True))
        write_json(staging / "tokenizer_config.json", built.config)


def _check_tensors(file: GgufFile, slots: Mapping[str, Slot], architecture: Architecture) -> None:
    for name, slot in slots.items():
        tensor = file.tensors.get(name)
        if tensor is None and not _zero_when_absent(name, architecture):
            raise ModelError(f"{file.path}: tensor {name} is missing")
        if tensor is not None and tensor.shape != slot.shape:
            raise ModelError(
                f"{file.path}: tensor {name} is {list(tensor.shape)}, but the metadata requires "
                f"{list(slot.shape)}"
            )
    known = slots.keys() | ({ROPE_DIVISORS} if "llama3" in architecture.scalings else set())
    unknown = sorted(file.tensors.keys() - known)
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} is not part of a {architecture.family} model "
            f"({len(unknown)} unknown tensors)",
            hint="this variant is not supported in GGUF files; use the model's safetensors instead",
        )


def _zero_when_absent(name: str, architecture: Architecture) -> bool:
    """Return whether a missing tensor is zero.

    Models with biases on q, k and v often have none on the output, but Hugging Face's llama needs all four.
    """
    return architecture.optional_biases and name.endswith(".attn_output.bias")


def _read_weights(file: GgufFile, model: Decoder, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Return the weights by their Hugging Face names."""
    tensors = (
        (name, file.array(name) if name in file.tensors else np.zeros(slot.shape, np.float32))
        for name, slot in slots.items()
    )
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in restore_parameters(slots, tensors):
        weights |= {key: part.contiguous() for key, part in model.to_hf_tensors(name, parameter).items()}
    return weights
