"""Reading GGUF: the converted directory has the model and the tokenizer of the file."""

import functools
import itertools
import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from whet.errors import ModelError
from whet.model_io.gguf.reader import convert_gguf, read_gguf
from whet.model_io.gguf.tokenizer_reader import build_tokenizer

Metadata = dict[str, Any]
Tensors = dict[str, np.ndarray]

_SPECIAL = ["<|end|>", "<|user|>", "<|pad|>", "<tool>"]
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_metadata(**changes: Any) -> Metadata:
    tokens = [*_SPECIAL, *_BYTES, *(left + right for left, right in _MERGES)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in _MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
    }
    return changed(metadata, changes)


def changed(metadata: Metadata, changes: Metadata) -> Metadata:
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


VOCAB = (
    len(byte_level_metadata()["tokenizer.ggml.tokens"]) + 3
)  # a few rows without a token, as many models have


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(sizes | changes))


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    for name, parameter in model.named_parameters():
        # transformers initializes these to 0 and 1, which would hide mistakes
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for llama.cpp, by index: pair i of a head is rows 2i and 2i+1, not i and i + half."""
    size = weight.shape[0] // heads
    order = [head * size + (row % 2) * (size // 2) + row // 2 for head in range(heads) for row in range(size)]
    return weight[order]


def gguf_tensors(model: LlamaForCausalLM) -> Tensors:
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            gguf_name = names[module]
            if gguf_name in heads:
                values = llama_cpp_rows(values, heads[gguf_name])
            tensors[f"blk.{layer}.{gguf_name}.{kind}"] = values
        else:
            outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[outer[name.rsplit(".", 1)[0]] + ".weight"] = values
    return tensors


@functools.cache
def tiny_tensors() -> Tensors:
    return gguf_tensors(tiny_model())


def gguf_metadata(config: LlamaConfig) -> Metadata:
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **byte_level_metadata(),
    }


def write_gguf(
    path: Path,
    metadata: Metadata,
    tensors: Tensors,
    *,
    kinds: dict[str, Kind] | None = None,
    arch: str = "llama",
) -> Path:
    """Write a file with the gguf package. Tensors named in `kinds` are already quantized to that type."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tmp_path: Path, model: LlamaForCausalLM, extra: Metadata | None = None, **more: Any) -> Path:
    metadata = gguf_metadata(model.config) | (extra or {})
    tensors = gguf_tensors(model) | more
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", metadata, tensors), tmp_path / "model")
    return tmp_path / "model"


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    tokens = torch.arange(100).reshape(2, 50) % VOCAB
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1},
    ],
    ids=["tied", "untied", "biases", "wide heads", "no grouping", "one key head"],
)
def test_converted_float32_file_has_the_same_logits(tmp_path: Path, changes: Metadata) -> None:
    model = tiny_model(**changes)
    directory = converted(tmp_path, model)
    reloaded, info = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(reloaded), logits(model))


def test_missing_output_bias_becomes_zero(tmp_path: Path) -> None:
    model = tiny_model(attention_bias=True)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    tensors = {name: values for name, values in gguf_tensors(model).items() if "attn_output.bias" not in name}
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), tensors)
    convert_gguf(source, tmp_path / "model")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "model")), logits(model))


def test_config_matches_the_metadata(tmp_path: Path) -> None:
    model = tiny_model()
    directory = converted(tmp_path, model)
    config = AutoConfig.from_pretrained(directory)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"):
        assert getattr(config, key) == getattr(model.config, key)
    assert config.rms_norm_eps == 1e-5  # and not the nearest float32, 9.99999974e-06
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert json.loads((directory / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 2,
    }
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


_WORST_ERROR = {  # relative to the largest value in a block of 32, with a margin for rounding
    Kind.F16: 1e-3,
    Kind.BF16: 8e-3,
    Kind.Q8_0: 1 / 127,
    Kind.Q5_0: 1 / 15,
    Kind.Q5_1: 1 / 15,
    Kind.Q4_0: 1 / 7,
    Kind.Q4_1: 1 / 7,
}


@pytest.mark.parametrize("kind", _WORST_ERROR, ids=lambda kind: kind.name)
def test_quantized_tensors_match_within_the_precision_of_their_type(tmp_path: Path, kind: Kind) -> None:
    model = tiny_model(num_hidden_layers=1)
    tensors, kinds = {}, {}
    for name, values in gguf_tensors(model).items():
        if values.ndim == 2:
            tensors[name], kinds[name] = gguf.quants.quantize(values, kind), kind
        else:
            tensors[name] = values
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), tensors, kinds=kinds)
    convert_gguf(source, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert weights[name].dtype == torch.float32
        blocks = parameter.detach().reshape(-1, 32)
        error = (weights[name].reshape(-1, 32) - blocks).abs().amax(dim=1)
        assert bool((error <= blocks.abs().amax(dim=1) * _WORST_ERROR[kind] + 1e-7).all()), name
    if kind == Kind.F16:
        query = model.model.layers[0].self_attn.q_proj.weight
        assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], query.half().float())


def test_q4_1_blocks_are_dequantized_by_their_definition(tmp_path: Path) -> None:
    """Q4_1 is defined as fp16 d, fp16 m, 16 bytes; value = d * nibble + m, low nibbles first."""
    model = tiny_model(num_hidden_layers=1)
    rng = np.random.default_rng(0)
    nibbles = rng.integers(0, 16, (64 * 96 // 32, 32))
    scales = rng.uniform(0.01, 0.1, (len(nibbles), 2)).astype(np.float16)
    packed = (nibbles[:, :16] | nibbles[:, 16:] << 4).astype(np.uint8)
    blocks = np.concatenate([scales.view(np.uint8), packed], axis=1).reshape(64, -1)
    name = "blk.0.ffn_down.weight"
    tensors = gguf_tensors(model) | {name: blocks}
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), tensors, kinds={name: Kind.Q4_1})
    convert_gguf(source, tmp_path / "model")
    weight = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    scale, minimum = scales.astype(np.float32).T[:, :, None]
    expected = (scale * nibbles.astype(np.float32) + minimum).reshape(64, 96)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


# Offsets of the fp16 scales in a block of each type. Random bits there could be infinite.
_SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


@pytest.mark.parametrize("kind", _SCALES, ids=lambda kind: kind.name)
def test_k_quants_are_dequantized_in_the_right_row_order(tmp_path: Path, kind: Kind) -> None:
    model = tiny_model(
        num_hidden_layers=1, hidden_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=128
    )
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (256, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for offset in _SCALES[kind]:
        scale = rng.uniform(1e-3, 1e-2, (256, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    name = "blk.0.attn_q.weight"
    tensors = gguf_tensors(model) | {name: blocks}
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), tensors, kinds={name: kind})
    convert_gguf(source, tmp_path / "model")
    weight = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(llama_cpp_rows(weight.numpy(), 2), expected)


def rope_divisors(model: LlamaForCausalLM) -> np.ndarray:
    """Return llama.cpp's rope_freqs.weight, computed from the frequencies of transformers."""
    plain = tiny_model(
        rope_parameters={"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]},
        head_dim=model.config.head_dim,
    )
    return (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()


def llama3_rope(**changes: Any) -> Metadata:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    } | changes


@pytest.mark.parametrize("factor", [8.0, 32.0, 16.0])
def test_llama3_rope_scaling_is_inferred_from_its_divisors(tmp_path: Path, factor: float) -> None:
    model = tiny_model(head_dim=64, rope_parameters=llama3_rope(factor=factor))
    directory = converted(tmp_path, model, **{"rope_freqs.weight": rope_divisors(model)})
    reloaded = LlamaForCausalLM.from_pretrained(directory)
    assert reloaded.config.rope_parameters == llama3_rope(factor=factor)
    assert torch.equal(logits(reloaded), logits(model))


def test_rope_divisors_of_one_mean_no_scaling(tmp_path: Path) -> None:
    directory = converted(tmp_path, tiny_model(), **{"rope_freqs.weight": np.ones(8, np.float32)})
    assert AutoConfig.from_pretrained(directory).rope_parameters["rope_type"] == "default"


def test_rope_divisors_of_another_scaling_are_rejected(tmp_path: Path) -> None:
    model = tiny_model(head_dim=64, rope_parameters=llama3_rope(high_freq_factor=6.0))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is not the rope scaling of a Llama 3 model"):
        converted(tmp_path, model, **{"rope_freqs.weight": rope_divisors(model)})


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {"scaling.type": "linear", "scaling.factor": 2.0}),
        ({"rope_type": "linear", "factor": 2.0}, {"scaling.factor": 2.0}),
        ({"rope_type": "linear", "factor": 2.0}, {"scale_linear": 2.0}),
        ({"rope_type": "linear", "factor": 2.0}, {"scaling.factor": 2.0, "scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
        ),
        ({"rope_type": "default"}, {"scaling.type": "none"}),
    ],
    ids=["linear", "linear by default", "old linear key", "old and new linear keys", "yarn", "none"],
)
def test_rope_scaling_in_the_metadata_is_converted(
    tmp_path: Path, rope: Metadata, metadata: Metadata
) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 50000.0, **rope})
    extra = {f"llama.rope.{key}": value for key, value in metadata.items()}
    reloaded = LlamaForCausalLM.from_pretrained(converted(tmp_path, model, extra))
    assert torch.equal(logits(reloaded), logits(model))


Change = Callable[[Metadata, Tensors], None]


def put(key: str, value: Any) -> Change:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def without(key: str) -> Change:
    return lambda metadata, tensors: (tensors if key in tensors else metadata).pop(key)


def tensor(name: str, *shape: int) -> Change:
    return lambda metadata, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


BAD_MODELS = {
    "missing tensor": (without("blk.1.ffn_up.weight"), "tensor blk.1.ffn_up.weight is missing"),
    "no embedding": (without("token_embd.weight"), "tensor token_embd.weight is missing"),
    "unknown tensor": (
        tensor("blk.0.attn_q_norm.weight", 16),
        "tensor blk.0.attn_q_norm.weight is not part of",
    ),
    "wrong shape": (
        tensor("blk.0.ffn_up.weight", 64, 96),
        r"tensor blk.0.ffn_up.weight is \[64, 96\], but the metadata requires \[96, 64\]",
    ),
    "missing key": (without("llama.block_count"), "llama.block_count is missing"),
    "zero heads": (put("llama.attention.head_count", 0), "llama.attention.head_count is 0"),
    "text for a number": (put("llama.embedding_length", "64"), "llama.embedding_length is '64'"),
    "layers that differ": (put("llama.attention.head_count_kv", [2, 4]), r"head_count_kv is \[2, 4\]"),
    "heads do not divide": (put("llama.attention.head_count_kv", 3), "4 heads of size 16 cannot share 3"),
    "a billion layers": (
        put("llama.block_count", 2**30),
        "the metadata has 1073741824 layers, but there are only 20 tensors",
    ),
    "partial rotary": (put("llama.rope.dimension_count", 8), "rotary, key and value sizes differ"),
    "experts": (put("llama.expert_count", 8), "llama.expert_used_count is missing"),
    "experts of another kind": (put("llama.expert_count", "8"), "llama.expert_count is '8'"),
    "bad epsilon": (
        put("llama.attention.layer_norm_rms_epsilon", -1.0),
        "epsilon is -1.0, not a positive number",
    ),
    "longrope": (put("llama.rope.scaling.type", "longrope"), "rope scaling 'longrope' is not supported"),
    "yarn of another kind": (
        lambda metadata, tensors: metadata.update(
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_log_multiplier": 2.0,
            }
        ),
        "llama.rope.scaling.yarn_log_multiplier is not supported",
    ),
    "wrong rope_freqs": (tensor("rope_freqs.weight", 3), "rope_freqs.weight does not have 8 values"),
    "no tokenizer": (without("tokenizer.ggml.model"), "has no tokenizer"),
    "unknown tokenizer": (put("tokenizer.ggml.model", "rwkv"), "the tokenizer 'rwkv' is not supported"),
    "unknown splitting": (
        put("tokenizer.ggml.pre", "falcon"),
        "tokenizer.ggml.pre='falcon' is not supported",
    ),
    "token out of range": (
        put("tokenizer.ggml.eos_token_id", 9999),
        "eos_token_id is 9999, not one of 266 tokens",
    ),
    "too few types": (put("tokenizer.ggml.token_type", [1, 1]), "266 tokens, but 2 token types"),
    "no merges": (without("tokenizer.ggml.merges"), "tokenizer.ggml.merges is not a list of strings"),
    "half a merge": (put("tokenizer.ggml.merges", ["ab"]), "the merge 'ab' is not two tokens"),
    "merge of no token": (put("tokenizer.ggml.merges", ["x y"]), "the tokenizer cannot be read: .*xy"),
    "a token twice": (
        lambda metadata, tensors: metadata["tokenizer.ggml.tokens"].__setitem__(5, "<|end|>"),
        r"the token '<\|end\|>' appears twice",
    ),
    "more tokens than rows": (
        lambda metadata, tensors: metadata["tokenizer.ggml.tokens"].extend(f"t{i}" for i in range(9)),
        "275 tokens, but the embedding has 269 rows",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_invalid_file_is_rejected_with_its_name_and_writes_nothing(
    tmp_path: Path, change: Change, message: str
) -> None:
    metadata, tensors = gguf_metadata(tiny_config()), dict(tiny_tensors())
    change(metadata, tensors)
    source = write_gguf(tmp_path / "tiny.gguf", metadata, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        convert_gguf(source, tmp_path / "model")
    assert str(source) in caught.value.message
    assert list(tmp_path.iterdir()) == [source]


def test_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", {}, {"a": np.zeros(32, np.float32)}, arch="mamba")
    with pytest.raises(ModelError, match="the architecture 'mamba' is not supported") as caught:
        convert_gguf(source, tmp_path / "model")
    assert "supported: llama" in str(caught.value.hint)


def test_unsupported_pre_tokenizer_lists_the_supported_ones() -> None:
    with pytest.raises(ModelError) as caught:
        build_tokenizer(byte_level_metadata(pre="falcon"), source="x.gguf", vocab_size=VOCAB, max_length=8)
    assert caught.value.hint.startswith("supported: default, gpt-2, olmo, llama-bpe, dbrx, qwen2")


def header(*, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


MALICIOUS_HEADERS = {
    "empty": (b"", "is not a GGUF file"),
    "a zip": (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
    "four bytes": (b"GGUF", "corrupt or truncated"),
    "version 1": (header(version=1), "is GGUF version 1"),
    "big-endian": (header(version=3 << 24), "is GGUF version 50331648"),
    "endless keys": (header(keys=2**63), "9223372036854775808 entries at offset .* do not fit into the file"),
    "endless tensors": (header(tensors=2**63), "entries at offset .* do not fit into the file"),
    "endless text": (header(keys=1) + struct.pack("<Q", 2**63) + bytes(64), "past the end"),
    "endless array": (
        header(keys=1) + text("a") + struct.pack("<IIQ", 9, 0, 2**62) + bytes(64),
        "entries at offset .* do not fit into the file",
    ),
    "endless list of text": (
        header(keys=1) + text("a") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64),
        "entries at offset .* do not fit into the file",
    ),
    "arrays in arrays": (
        header(keys=1) + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000,
        "unknown value type 9",
    ),
    "unknown type": (header(keys=1) + text("a") + struct.pack("<I", 99) + bytes(64), "unknown value type 99"),
    "not UTF-8": (
        header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1) + bytes(16),
        "not UTF-8",
    ),
    "a key twice": (
        header(keys=2) + (text("a") + struct.pack("<II", 4, 1)) * 2,
        "the key a appears twice",
    ),
    "no alignment": (
        header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment is 0",
    ),
    "a tensor of many dimensions": (
        header(tensors=1) + text("a") + struct.pack("<I", 2**31) + bytes(64),
        "tensor a has 2147483648 dimensions",
    ),
    "a tensor of no values": (
        header(tensors=1) + text("a") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64),
        "tensor a has 0 bytes",
    ),
    "an enormous tensor": (
        header(tensors=1) + text("a") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0) + bytes(64),
        "tensor a has",
    ),
    "a tensor far away": (
        header(tensors=1) + text("a") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64),
        "tensor a has 16 bytes at",
    ),
    "a tensor of an unknown type": (
        header(tensors=1) + text("a") + struct.pack("<IQIQ", 1, 4, 777, 0) + bytes(64),
        "tensor a has the unknown type 777",
    ),
    "a broken block": (
        header(tensors=1) + text("a") + struct.pack("<IQIQ", 1, 33, int(Kind.Q4_0), 0) + bytes(64),
        r"tensor a of shape \[33\] cannot be stored as Q4_0",
    ),
    "a tensor twice": (
        header(tensors=2) + (text("a") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + bytes(64),
        "tensor a appears twice",
    ),
}


@pytest.mark.parametrize(("content", "message"), MALICIOUS_HEADERS.values(), ids=MALICIOUS_HEADERS)
def test_malicious_header_is_rejected_before_allocation(tmp_path: Path, content: bytes, message: str) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(source)
    assert str(source) in caught.value.message
    assert caught.value.hint


def test_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none.gguf cannot be read: No such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "model")


def test_truncated_or_corrupt_files_give_a_model_error_or_a_model(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=8)
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), gguf_tensors(model))
    content = source.read_bytes()
    header_end = min(entry.start for entry in read_gguf(source).tensors.values())
    rng = random.Random(0)
    bad, target = tmp_path / "bad.gguf", tmp_path / "model"
    for size in [rng.randrange(len(content) - 100) for _ in range(40)]:
        bad.write_bytes(content[:size])
        with pytest.raises(ModelError):
            convert_gguf(bad, target)
    num_rejected = 0
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(header_end)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        bad.write_bytes(damaged)
        try:
            convert_gguf(bad, target)
            shutil.rmtree(target)
        except ModelError:
            num_rejected += 1
    assert num_rejected > 50


def test_unsupported_quantization_is_named(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    source = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(model.config), gguf_tensors(model))
    content = source.read_bytes()
    entry = text("blk.0.ffn_up.weight") + struct.pack("<IQQ", 2, 64, 96)
    assert content.count(entry + struct.pack("<I", 0)) == 1
    source.write_bytes(
        content.replace(entry + struct.pack("<I", 0), entry + struct.pack("<I", int(Kind.I32)))
    )
    with pytest.raises(
        ModelError, match=r"tensor blk.0.ffn_up.weight is stored as I32, which is not supported"
    ):
        convert_gguf(source, tmp_path / "model")


TRICKY = [
    "",
    " ",
    "   three before, two after  ",
    "\n\n\ttabs and\r\nlines\n",
    "naïve café — “quotes” … 中文, 日本語, עברית, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\ufeff",
    "e\u0301 and \u00e9",
    "def f(x):\n    return x**2  # 3.14159 1234567",
    "don't I'LL we've 'tis",
    "\x00\x01\x7f",
    "a" * 500,
]


def byte_level(**changes: Any) -> Tokenizer:
    return build_tokenizer(
        byte_level_metadata(**changes), source="x.gguf", vocab_size=VOCAB, max_length=128
    ).tokenizer


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "smollm", None])
def test_byte_level_text_round_trips(pre: str | None) -> None:
    tokenizer = byte_level(pre=pre, add_bos_token=False)
    for sample in TRICKY:
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", *"1234.5", "Ġ", "Ġnow", "Ġ!!", "Ċ", "Ċ", "x"]),
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ1234", ".", "5", "Ġ", "Ġnow", "Ġ!!", "Ċ", "Ċ", "x"]),
        ("default", ["I", "'ll", "Ġpay", "Ġ1234", ".", "5", "Ġ", "Ġnow", "Ġ!!", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "4", ".", "5", "Ġ", "Ġnow", "Ġ!!ĊĊ", "x"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", ".", "5", "Ġ", "Ġnow", "Ġ!!ĊĊ", "x"]),
    ],
)
def test_pre_tokenizers_split_like_their_models(pre: str, pieces: list[str]) -> None:
    splitter = byte_level(pre=pre).pre_tokenizer
    assert splitter is not None
    assert [piece for piece, _ in splitter.pre_tokenize_str("I'll pay 1234.5  now !!\n\nx")] == pieces


def test_qwen2_composes_accents_first() -> None:
    tokenizer = byte_level(pre="qwen2")
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_merges_are_applied_in_order_and_digits_stay_separate() -> None:
    assert byte_level().encode("hello world 12").tokens == ["hello", "Ġw", *"orld", "Ġ", "1", "2"]
    assert byte_level(pre="gpt-2").encode("hello 12").tokens == ["hello", "Ġ", "12"]


def test_llama3_keeps_a_word_that_is_a_token() -> None:
    merges = ["h e", "l l"]  # no merge leads to "hello", which is a token
    assert byte_level(pre="llama-bpe", merges=merges, add_bos_token=False).encode("hello").tokens == ["hello"]
    assert byte_level(pre="smollm", merges=merges).encode("hello").tokens == ["he", "ll", "o"]


def test_control_and_user_defined_tokens_are_atomic_and_only_control_is_special() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("he<|user|>he<tool><|end|>").ids
    assert [tokenizer.id_to_token(index) for index in ids] == ["he", "<|user|>", "he", "<tool>", "<|end|>"]
    assert tokenizer.decode(ids) == "hehe<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|user|>he<tool><|end|>"


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, ["he"]),
        ({"add_bos_token": True}, ["<|user|>", "he"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|user|>", "he", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|user|>", "he"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["he"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["he"]),
    ],
    ids=["default", "bos", "bos and eos", "llama 3", "llama 3 without bos", "no bos token"],
)
def test_bos_and_eos_follow_the_metadata(tmp_path: Path, changes: Metadata, tokens: list[str]) -> None:
    built = build_tokenizer(byte_level_metadata(**changes), source="x.gguf", vocab_size=VOCAB, max_length=128)
    assert built.tokenizer.encode("he").tokens == tokens
    assert built.tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]
    built.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(built.config))
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.convert_ids_to_tokens(reloaded("he")["input_ids"]) == tokens
    assert reloaded("he", "he")["input_ids"] == built.tokenizer.encode("he", "he").ids


def test_directory_loads_as_a_fast_tokenizer_with_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, tiny_model()))
    assert tokenizer.is_fast
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|user|>",
        "<|end|>",
        "<|pad|>",
    )
    assert tokenizer.model_max_length == 128
    assert len(tokenizer) == 266
    chat = [{"role": "user", "content": "hello 12"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>hello 12<|end|>"
    assert tokenizer.decode(tokenizer("hello , wo 'n't 12 ?")["input_ids"]) == "hello , wo 'n't 12 ?"


def test_end_of_turn_token_also_ends_generation() -> None:
    metadata = byte_level_metadata(eot_token_id=2)
    ids = build_tokenizer(metadata, source="x.gguf", vocab_size=VOCAB, max_length=8).ids
    assert ids["eos_token_id"] == [0, 2]


# A SentencePiece vocabulary whose scores are not in the order of its ids.
_PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "aa", "▁▁", "ca", "cab", "▁c"]
_PIECE_SCORES = [-20, -21, -22, -23, -3, -1, -7, -2, -6, -5, -4, -9, -8, -10]


_NAMED = ["bos_token_id", "eos_token_id", "unknown_token_id"]


def sentencepiece_metadata(**changes: Any) -> Metadata:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, "<▁x>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(score) for score in _PIECE_SCORES] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return changed(metadata, changes)


def sentencepiece(**changes: Any) -> Tokenizer:
    metadata = sentencepiece_metadata(**changes)
    return build_tokenizer(metadata, source="x.gguf", vocab_size=400, max_length=128).tokenizer


def sentencepiece_reference(sample: str) -> list[str]:
    """Tokenize by the definition of SentencePiece's BPE: merge the neighbors whose union scores best."""
    scores = dict(zip(_PIECES, _PIECE_SCORES, strict=True))
    symbols = list("▁" + sample.replace(" ", "▁"))
    while True:
        unions = [
            (scores.get(left + right, -math.inf), -index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
        ]
        score, position = max(unions, default=(-math.inf, 0))
        if score == -math.inf:
            break
        symbols[-position : -position + 2] = ["".join(symbols[-position : -position + 2])]
    known = {symbol: [symbol] for symbol in _PIECES}
    return [
        token
        for symbol in symbols
        for token in known.get(symbol, [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    rng = random.Random(0)
    for _ in range(300):
        sample = "".join(rng.choice("aabbcc  é") for _ in range(rng.randrange(1, 24)))
        assert tokenizer.encode(sample).tokens == sentencepiece_reference(sample), repr(sample)


def test_sentencepiece_text_round_trips() -> None:
    for prefix in (True, False):
        tokenizer = sentencepiece(add_space_prefix=prefix)
        for sample in TRICKY:
            assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


def test_sentencepiece_adds_bos_by_default_and_keeps_special_tokens_atomic() -> None:
    assert sentencepiece().encode("ab").tokens == ["<s>", "▁ab"]
    assert sentencepiece(add_bos_token=False, add_space_prefix=False).encode("ab").tokens == ["ab"]
    assert sentencepiece(add_bos_token=False).encode("ab</s>ab").tokens == ["▁ab", "</s>", "▁ab"]
    assert sentencepiece(add_bos_token=False).encode("< x>").ids == [
        273
    ]  # user-defined, matched in the raw text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "274 tokens, but 0 scores"),
        ({"scores": ["a"]}, "tokenizer.ggml.scores is not a list of numbers"),
        ({"unknown_token_id": 5000}, "unknown_token_id is 5000"),
        ({"tokens": ["x" * 5000], "scores": [0.0], "token_type": [1]}, "a token has 5000 characters"),
        (
            {"tokens": [""], "scores": [0.0], "token_type": [3]} | dict.fromkeys(_NAMED),
            "the special token 0 has no text",
        ),
    ],
    ids=[
        "no scores",
        "scores are strings",
        "unknown out of range",
        "too long piece",
        "special token without text",
    ],
)
def test_invalid_sentencepiece_vocabulary_is_rejected(changes: Metadata, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        sentencepiece(**changes)


@pytest.fixture(scope="module")
def smollm2(smollm2_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_directory)


def test_smollm2_text_round_trips(smollm2: Any) -> None:
    for sample in TRICKY:
        assert smollm2.decode(smollm2(sample)["input_ids"]) == sample


def test_smollm2_digits_are_separate_tokens(smollm2: Any) -> None:
    assert smollm2.tokenize("In 2025: 3.14") == ["In", "Ġ", *"2025", ":", "Ġ", "3", ".", "1", "4"]


def test_smollm2_special_tokens_are_atomic_and_none_is_added(smollm2: Any) -> None:
    assert smollm2("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    assert smollm2.decode([1, 4093, 2], skip_special_tokens=True) == "user"


def test_smollm2_answers_in_its_chat_format(smollm2: Any, smollm2_directory: Path) -> None:
    """Run one forward pass over the expected answer, which greedy decoding must reproduce."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = smollm2("The capital of France is Paris.<|im_end|>")["input_ids"]
    tokens = torch.tensor([smollm2(prompt)["input_ids"] + answer])
    with torch.no_grad():
        predicted = LlamaForCausalLM.from_pretrained(smollm2_directory)(tokens).logits[0].argmax(dim=-1)
    assert predicted[-len(answer) - 1 : -1].tolist() == answer
