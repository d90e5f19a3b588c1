"""Write a llama model with its tokenizer and chat template as a GGUF file for llama.cpp.

This module packs the header itself, because the gguf package's writer opens its own files and cannot write
the empty list of merges of a byte tokenizer.
"""

import dataclasses
import math
import struct
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
from whet.model_io.gguf.layout import ALIGNMENT, ARRAY, SCALARS, STRING, Slot, join_rotary_pairs, slots_of
from whet.model_io.gguf.tokenizer_writer import tokenizer_metadata
from whet.models.decoder import Decoder
from whet.models.families import llama
from whet.models.language_model import LanguageModel
from whet.models.rope import inverse_frequencies
from whet.models.spec import LinearRopeScaling, Llama3RopeScaling, ModelSpec, RopeSpec, YarnRopeScaling
from whet.storage import create_file_atomically, remove_temporary_files, write_chunks

KINDS = {
    "f32": (Kind.F32, LlamaFileType.ALL_F32),
    "f16": (Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
_UINT32, _FLOAT32, _BOOL, _INT32 = 4, 6, 7, 5
# the largest magnitude that each type can represent: a block has an fp16 scale per quantization step
_MAX_MAGNITUDES = {Kind.F16: 65504.0, Kind.Q8_0: 65504.0 * 127, Kind.Q4_0: 65504.0 * 8}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A tensor to write: its shape, its storage type, and a function that computes its values."""

    shape: tuple[int, ...]
    kind: Kind
    values: Callable[[], NDArray[np.float32]]

    @property
    def size(self) -> int:
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block_values * block_bytes


def write_gguf(
    path: str | Path,
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    kind: str,
    end_tokens: Collection[int] = (),
) -> None:
    """Write the model as one GGUF file, which appears under its name only when it is complete.

    `end_tokens` are the ids that end a completion. Norms and biases are always float32. With q4_0, the
    embedding and the head are q8_0, because 4 bits degrade them most.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown GGUF type {kind!r}", hint=f"use one of {', '.join(KINDS)}")
    spec = llama_spec(model)
    if tokenizer is None:
        raise ModelError("a GGUF file needs a tokenizer, but this model has none")
    tensor_kind, file_type = KINDS[kind]
    metadata = {
        "general.architecture": "llama",
        "general.name": Path(path).stem,
        "general.file_type": int(file_type),
        "general.quantization_version": 2,
        **_model_metadata(spec),
        **tokenizer_metadata(tokenizer, vocab_size=spec.vocab_size, end_tokens=end_tokens),
    }
    entries = dict(_entries(spec, model, tensor_kind))
    path = Path(path)
    remove_temporary_files(path.parent, only_name=path.name)
    with create_file_atomically(path) as staging:
        write_chunks(staging, _chunks(metadata, entries))


def llama_values(model: LanguageModel) -> dict[str, Callable[[], NDArray[np.float32]]]:
    """Return functions that compute the unrounded values of each tensor, by GGUF name."""
    return {name: entry.values for name, entry in _entries(llama_spec(model), model, Kind.F32)}


def llama_spec(model: LanguageModel) -> ModelSpec:
    """Return the spec of the model as a llama, or raise ModelError if it is not equivalent to one."""
    family = str(model.hf_config().get("model_type"))
    if isinstance(model, Decoder):
        spec = dataclasses.replace(model.spec, family=llama.MODEL_TYPE)
        if _is_llama(spec):
            return spec
    raise ModelError(
        f"this {family!r} model cannot be exported to GGUF, which only supports llama models",
        hint="export it as a Hugging Face directory (--to hf), which llama.cpp's converter reads",
    )


def _is_llama(spec: ModelSpec) -> bool:
    """Return whether a llama's config.json can represent the spec, whatever its family."""
    try:
        is_equal = llama.from_config(llama.to_config(spec)) == spec
    except (ModelError, KeyError):  # for example, a layer without attention
        return False
    return is_equal and spec.blocks[0].dense_feedforward.activation == "silu"


def _model_metadata(spec: ModelSpec) -> dict[str, object]:
    attention, rope = spec.blocks[0].grouped_attention, spec.blocks[0].grouped_attention.rope
    assert rope is not None
    return {
        "llama.block_count": len(spec.blocks),
        "llama.context_length": spec.max_positions,
        "llama.embedding_length": spec.d_model,
        "llama.feed_forward_length": spec.blocks[0].dense_feedforward.width,
        "llama.attention.head_count": attention.heads,
        "llama.attention.head_count_kv": attention.kv_heads,
        "llama.attention.key_length": attention.head_dim,
        "llama.attention.value_length": attention.head_dim,
        "llama.attention.layer_norm_rms_epsilon": spec.norm.eps,
        "llama.rope.dimension_count": attention.head_dim,
        "llama.rope.freq_base": rope.theta,
        "llama.vocab_size": spec.vocab_size,
        **_rope_metadata(rope),
    }


def _rope_metadata(rope: RopeSpec) -> dict[str, object]:
    """Return the metadata of linear and YaRN scaling. Llama 3's scaling is stored as a tensor instead."""
    match rope.scaling:
        case LinearRopeScaling(factor=factor):
            fields: dict[str, object] = {"type": "linear", "factor": factor}
        case YarnRopeScaling() as scaling:
            plain = YarnRopeScaling(scaling.factor, scaling.original_max_positions, scaling.attention_factor)
            default = 1.0 if scaling.factor <= 1 else 0.1 * float(np.log(scaling.factor)) + 1.0
            if plain != scaling or abs(default - scaling.attention_factor) > 1e-6:
                raise ModelError(
                    "GGUF only stores the factor and the original length of YaRN, but this model has other "
                    "YaRN settings"
                )
            fields = {
                "type": "yarn",
                "factor": scaling.factor,
                "original_context_length": scaling.original_max_positions,
            }
        case _:
            fields = {}
    return {f"llama.rope.scaling.{key}": value for key, value in fields.items()}


def _entries(spec: ModelSpec, model: LanguageModel, kind: Kind) -> Iterator[tuple[str, _Entry]]:
    tensors = {llama.hf_name(name): tensor for name, tensor in model.state_dict().items()}
    rope, head_dim = spec.blocks[0].grouped_attention.rope, spec.blocks[0].grouped_attention.head_dim
    if rope is not None and isinstance(rope.scaling, Llama3RopeScaling):
        plain = inverse_frequencies(RopeSpec(theta=rope.theta), head_dim)
        divisors = (plain / inverse_frequencies(rope, head_dim)).numpy()
        yield "rope_freqs.weight", _Entry(divisors.shape, Kind.F32, lambda: divisors)
    for name, slot in slots_of(llama.to_config(spec)).items():
        if slot.name not in tensors:
            raise ModelError(f"the model has no {slot.name}", hint="merge its adapter first: whet.merge")
        tensor = tensors[slot.name]
        tensor_kind = _tensor_kind(name, slot, kind)
        largest = float(tensor.abs().max())
        if not largest <= _MAX_MAGNITUDES.get(tensor_kind, np.finfo(np.float32).max):
            raise ModelError(
                f"{slot.name} has values that {tensor_kind.name} cannot represent: the largest is "
                f"{largest:.3g}",
                hint="choose bf16" if math.isfinite(largest) else "the weights of the model are not finite",
            )
        yield name, _Entry(slot.shape, tensor_kind, partial(_values, tensor, slot))


def _tensor_kind(name: str, slot: Slot, kind: Kind) -> Kind:
    if len(slot.shape) == 1:
        return Kind.F32
    if kind == Kind.Q4_0 and name in ("token_embd.weight", "output.weight"):
        kind = Kind.Q8_0
    return kind if slot.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16  # only full blocks


def _values(tensor: torch.Tensor, slot: Slot) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return join_rotary_pairs(values, slot.rotary_heads) if slot.rotary_heads else values


def _chunks(metadata: Mapping[str, object], entries: Mapping[str, _Entry]) -> Iterator[bytes | memoryview]:
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
    if isinstance(value, list):
        if not value or isinstance(value[0], str):
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_pack_text, value))
        kind = _FLOAT32 if isinstance(value[0], float) else _INT32  # as in llama.cpp's converter
        packed = struct.pack(f"<{len(value)}{SCALARS[kind]}", *value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + packed
    kind = _BOOL if isinstance(value, bool) else _FLOAT32 if isinstance(value, float) else _UINT32
    return struct.pack("<I", kind) + struct.pack(f"<{SCALARS[kind]}", value)
