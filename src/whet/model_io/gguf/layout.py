"""The GGUF format as reader and writer see it: value types, the tensors of a llama, their row order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# the numeric types of metadata values as struct format characters, and the two other types
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # of every tensor, unless the metadata has another value


@dataclass(frozen=True)
class Slot:
    """The Hugging Face name and shape of a GGUF tensor, and the heads into which its rows are grouped."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def slots_of(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Return every tensor that the model must have, by GGUF name."""
    vocab, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = heads * config["head_dim"], kv_heads * config["head_dim"]
    linear = {
        "attn_q": ("self_attn.q_proj", (query, hidden), heads),
        "attn_k": ("self_attn.k_proj", (key, hidden), kv_heads),
        "attn_v": ("self_attn.v_proj", (key, hidden), 0),
        "attn_output": ("self_attn.o_proj", (hidden, query), 0),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), 0),
        "ffn_up": ("mlp.up_proj", (inner, hidden), 0),
        "ffn_down": ("mlp.down_proj", (hidden, inner), 0),
    }
    slots = {
        "token_embd.weight": Slot("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": Slot("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        slots["output.weight"] = Slot("lm_head.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        hf, gguf = f"model.layers.{layer}", f"blk.{layer}"
        slots[f"{gguf}.attn_norm.weight"] = Slot(f"{hf}.input_layernorm.weight", (hidden,))
        slots[f"{gguf}.ffn_norm.weight"] = Slot(f"{hf}.post_attention_layernorm.weight", (hidden,))
        for name, (module, shape, rotary_heads) in linear.items():
            slots[f"{gguf}.{name}.weight"] = Slot(f"{hf}.{module}.weight", shape, rotary_heads)
            if config["attention_bias" if name.startswith("attn") else "mlp_bias"]:
                slots[f"{gguf}.{name}.bias"] = Slot(f"{hf}.{module}.bias", shape[:1], rotary_heads)
    return slots


def split_rotary_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Convert rows with adjacent rotary pairs (llama.cpp) to pairs half a head apart (Hugging Face)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def join_rotary_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Convert rows to llama.cpp's order, the inverse of `split_rotary_pairs`."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
