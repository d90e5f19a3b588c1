"""Write a model with its tokenizer and chat template as a GGUF file for llama.cpp.

This module packs the header itself, because the gguf package's writer opens its own files and cannot write
the empty list of merges of a byte tokenizer.
"""

import dataclasses
import math
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray

from whet.errors import ConfigError, ModelError
from whet.model_io.gguf.config_writer import GgufModel, describe_model
from whet.model_io.gguf.layout import ALIGNMENT, ARRAY, SCALARS, STRING
from whet.model_io.gguf.quantize import K_QUANTS, check_quantizer, quantize_file
from whet.model_io.gguf.tensor_names import Slot, build_skeleton, tensor_slots
from whet.model_io.gguf.tokenizer_writer import tokenizer_metadata
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.storage import create_file_atomically, remove_temporary_files, write_chunks

KINDS = {
    "f32": (Kind.F32, LlamaFileType.ALL_F32),
    "f16": (Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (Kind.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (Kind.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (Kind.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
GGUF_KINDS = (*KINDS, *K_QUANTS)
_FOUR_BITS = (Kind.Q4_0, Kind.Q4_1)
# routers and learned positions, as in llama.cpp's converter
_ALWAYS_FLOAT32 = ("ffn_gate_inp.weight", "position_embd.weight")
_UINT8, _UINT32, _INT32, _FLOAT32, _BOOL = 0, 4, 5, 6, 7
# the largest magnitude that each type can represent: a block has an fp16 scale per quantization step
# or for types with a minimum, the fp16 minimum itself
_MAX_MAGNITUDES = {
    Kind.F16: 65504.0,
    Kind.Q8_0: 65504.0 * 127,
    Kind.Q5_1: 65504.0,
    Kind.Q5_0: 65504.0 * 16,
    Kind.Q4_1: 65504.0,
    Kind.Q4_0: 65504.0 * 8,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor to write: its shape, its storage type, and a function that computes its values."""

    shape: tuple[int, ...]
    kind: Kind
    values: Callable[[], NDArray[np.float32]]

    @property
    def size(self) -> int:
        """Number of bytes in the file."""
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block_values * block_bytes


def write_gguf(
    path: str | Path,
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    kind: str,
    end_tokens: Collection[int] = (),
    imatrix: str | Path | None = None,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the model as one GGUF file, which appears under its name only when it is complete.

    Norms, biases, routers and learned positions are always float32. With 4 bits, the embedding and the head
    are q8_0, because 4 bits degrade them most.

    Args:
        path: The file to write.
        model: The model, without adapters.
        tokenizer: Its transformers tokenizer.
        kind: The type of the matrices: one of `KINDS`, or of llama.cpp's k-quants.
        end_tokens: The ids that end a completion.
        imatrix: An importance matrix of llama.cpp, for k-quants.
        parameters: The parameters to write, by their names in the model; by default the model's own.

    Raises:
        ConfigError: If the type is unknown, or needs llama.cpp and it is not installed.
        ModelError: If GGUF cannot represent the model, its tokenizer or a value.
    """
    if kind not in GGUF_KINDS:
        raise ConfigError(f"unknown GGUF type {kind!r}", hint=f"use one of {', '.join(GGUF_KINDS)}")
    if imatrix is not None and kind not in K_QUANTS:
        raise ConfigError(
            f"an importance matrix only applies to k-quants, not to {kind}",
            hint=f"use one of {', '.join(K_QUANTS)}",
        )
    path = Path(path)
    tensor_kind, file_type = KINDS.get(kind, KINDS["f32"])
    described = describe_language_model(model)
    if tokenizer is None:
        raise ModelError("a GGUF file needs a tokenizer, but this model has none")
    metadata = {
        "general.architecture": described.architecture.name,
        "general.name": path.stem,  # replaced below if llama.cpp's tokenization depends on it
        "general.file_type": int(file_type),
        "general.quantization_version": 2,
        **described.metadata,
        **tokenizer_metadata(
            tokenizer, vocab_size=described.spec.vocab_size, end_tokens=end_tokens, name=path.stem
        ),
    }
    entries = dict(_entries(described, parameters or model.state_dict(), tensor_kind))
    if kind in K_QUANTS:
        check_quantizer(kind, imatrix, {name: entry.shape for name, entry in entries.items()})
    remove_temporary_files(path.parent, only_name=path.name)
    with create_file_atomically(path) as staging:
        if kind not in K_QUANTS:
            write_chunks(staging, pack_file(metadata, entries))
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".quantize-") as directory:
            source = Path(directory) / "float.gguf"
            write_chunks(source, pack_file(metadata, entries))
            quantize_file(source, staging, kind, imatrix=imatrix)


def gguf_values(model: LanguageModel) -> dict[str, Callable[[], NDArray[np.float32]]]:
    """Return functions that compute the unrounded values of each tensor, by GGUF name."""
    entries = _entries(describe_language_model(model), model.state_dict(), Kind.F32)
    return {name: entry.values for name, entry in entries}


def describe_language_model(model: LanguageModel) -> GgufModel:
    """Return the model as GGUF describes it, or raise ModelError if llama.cpp would compute another one."""
    if isinstance(model, Decoder):
        return describe_model(model.spec)
    family = str(model.hf_config().get("model_type"))
    raise ModelError(
        f"this {family!r} model cannot be exported to GGUF: whet runs it through transformers",
        hint="export it as a Hugging Face directory (--to hf), which llama.cpp's converter reads",
    )


def _entries(
    described: GgufModel, tensors: Mapping[str, torch.Tensor], kind: Kind
) -> Iterator[tuple[str, Entry]]:
    for name, values in described.extra.items():
        yield name, Entry(values.shape, Kind.F32, partial(np.asarray, values))
    for name, slot in tensor_slots(build_skeleton(described.spec), described.architecture).items():
        if slot.parameter not in tensors:
            raise ModelError(f"the model has no {slot.parameter}", hint="merge its adapter first: whet.merge")
        tensor = tensors[slot.parameter]
        tensor_kind = _tensor_kind(name, slot, kind)
        largest = float(tensor.abs().max())
        if not largest <= _MAX_MAGNITUDES.get(tensor_kind, np.finfo(np.float32).max):
            raise ModelError(
                f"{slot.parameter} has values that {tensor_kind.name} cannot represent: the largest is "
                f"{largest:.3g}",
                hint="choose bf16" if math.isfinite(largest) else "the weights of the model are not finite",
            )
        yield name, Entry(slot.shape, tensor_kind, partial(slot.store, tensor))


def _tensor_kind(name: str, slot: Slot, kind: Kind) -> Kind:
    if len(slot.shape) == 1 or name.endswith(_ALWAYS_FLOAT32):
        return Kind.F32
    if kind in _FOUR_BITS and name in ("token_embd.weight", "output.weight"):
        kind = Kind.Q8_0
    return kind if slot.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16  # only full blocks


def pack_file(metadata: Mapping[str, object], entries: Mapping[str, Entry]) -> Iterator[bytes | memoryview]:
    """Yield the contents of the file, one tensor at a time."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
    header += b"".join(_pack_text(key) + _pack_value(value) for key, value in metadata.items())
    offset = 0
    for name, entry in entries.items():
        header += _pack_text(name) + struct.pack("<I", len(entry.shape))
        header += struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))  # fastest dimension first
        header += struct.pack("<IQ", int(entry.kind), offset)
        offset += entry.size + _padding(entry.size)
    yield header + bytes(_padding(len(header)))
    for entry in entries.values():
        stored = np.ascontiguousarray(quantize(entry.values(), entry.kind)).view(np.uint8)
        assert stored.nbytes == entry.size
        yield stored.reshape(-1).data
        del stored
        yield bytes(_padding(entry.size))


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _pack_text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pack_value(value: object) -> bytes:
    """Return the type of a metadata value followed by the value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _pack_text(value)
    if isinstance(value, bytes):
        return struct.pack("<IIQ", ARRAY, _UINT8, len(value)) + value
    if isinstance(value, list):
        if not value or isinstance(value[0], str):
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_pack_text, value))
        kinds = {bool: _BOOL, float: _FLOAT32}
        kind = kinds.get(type(value[0]), _INT32)  # as in llama.cpp's converter
        packed = struct.pack(f"<{len(value)}{SCALARS[kind]}", *value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + packed
    kind = _BOOL if isinstance(value, bool) else _FLOAT32 if isinstance(value, float) else _UINT32
    return struct.pack("<I", kind) + struct.pack(f"<{SCALARS[kind]}", value)
