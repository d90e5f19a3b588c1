"""The tensors of a GGUF file: their names, shapes and layout, derived from the parameters of a decoder."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from whet.errors import ModelError
from whet.model_io.gguf.architectures import Architecture
from whet.models.decoder import Decoder
from whet.models.spec import AttentionSpec, ModelSpec

ROPE_DIVISORS = "rope_freqs.weight"  # of llama 3's scaling

_MODULES = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# this name means the norm before the feed-forward layer, or the norm after attention
_SECOND_NORM = {"pre": "ffn_norm", "post": "post_attention_norm", "sandwich": "post_attention_norm"}
# a parameter with all experts, and the tensors that its rows are split into
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}


@dataclass(frozen=True)
class Slot:
    """One tensor of a GGUF file: the decoder's parameter that it holds, and how it is stored."""

    parameter: str
    shape: tuple[int, ...]
    rotary_heads: int = 0  # heads whose rows are stored as adjacent rotary pairs; 0: as in the decoder
    offset: float = 0.0  # added to the parameter
    part: int = 0  # of the parameter's rows, split into `parts` equal tensors
    parts: int = 1

    def store(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        """Return the values in the file for the values of the parameter."""
        rows = tensor.detach().to("cpu", torch.float32)
        if self.parts > 1:
            rows = rows.chunk(self.parts, dim=-2)[self.part]
        values: NDArray[np.float32] = rows.contiguous().numpy()
        if self.rotary_heads:
            values = join_rotary_pairs(values, self.rotary_heads)
        return values + np.float32(self.offset) if self.offset else values

    def restore(self, values: NDArray[np.float32]) -> torch.Tensor:
        """Return the values of (this part of) the parameter for the values in the file."""
        if self.rotary_heads:
            values = split_rotary_pairs(values, self.rotary_heads)
        if self.offset:
            values = values - np.float32(self.offset)
        # a float32 array is still a view of the read-only file, so torch needs a writable copy
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def build_skeleton(spec: ModelSpec) -> Decoder:
    """Return a decoder without memory, for the names and shapes of its parameters."""
    with torch.device("meta"):
        return Decoder(spec)


def tensor_slots(model: Decoder, architecture: Architecture) -> dict[str, Slot]:
    """Return every tensor of the model's GGUF file, by its name in the file."""
    return dict(
        slot
        for name, parameter in model.named_parameters()
        for slot in _slots(model.spec, architecture, name, tuple(parameter.shape))
    )


def _slots(
    spec: ModelSpec, architecture: Architecture, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, Slot]]:
    prefix, inner = "", name
    attention = None
    if match := re.fullmatch(r"layers\.(\d+)\.(.*)", name):
        prefix, inner = f"blk.{match[1]}.", match[2]
        block = spec.blocks[int(match[1])]
        attention = block.attention if isinstance(block.attention, AttentionSpec) else None
        if inner in _EXPERTS:
            parts = _EXPERTS[inner]
            part_shape = (shape[0], shape[1] // len(parts), shape[2])
            for index, part in enumerate(parts):
                yield f"{prefix}{part}.weight", Slot(name, part_shape, part=index, parts=len(parts))
            return
    module, _, kind = inner.rpartition(".")
    if module == "post_attention_layernorm":
        gguf_module = _SECOND_NORM[block.placement]
    elif module in _MODULES:
        gguf_module = _MODULES[module]
    else:
        raise ModelError(f"GGUF has no tensor for {name}")
    yield (
        f"{prefix}{gguf_module}.{kind}",
        Slot(
            name,
            shape,
            rotary_heads=_rotary_heads(attention, gguf_module) if architecture.adjacent_rotary else 0,
            offset=float(spec.norm.offset and module.endswith("norm")),
        ),
    )


def _rotary_heads(attention: AttentionSpec | None, gguf_module: str) -> int:
    """Return the heads of a projection to queries or keys, else 0.

    llama.cpp's converter also reorders the layers of SmolLM3 that have no RoPE, which changes no score.
    """
    if attention is None:
        return 0
    return {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(gguf_module, 0)


def restore_parameters(
    slots: Mapping[str, Slot], tensors: Iterator[tuple[str, NDArray[np.float32]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the decoder for the tensors of a file, in the order of the slots."""
    parts: list[torch.Tensor] = []
    for name, values in tensors:
        slot = slots[name]
        parts.append(slot.restore(values))
        if len(parts) == slot.parts:
            yield slot.parameter, parts[0] if slot.parts == 1 else torch.cat(parts, dim=-2)
            parts = []


def split_rotary_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Convert rows with adjacent rotary pairs (llama.cpp) to pairs half a head apart (Hugging Face)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def join_rotary_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Convert rows to llama.cpp's order, the inverse of `split_rotary_pairs`."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
