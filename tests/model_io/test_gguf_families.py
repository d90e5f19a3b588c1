"""GGUF files of every family: names and values by the gguf package's own tables, and a round trip."""

import dataclasses
import json
import re

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import whet
from parity.test_families import CLASSES, EAGER, randomize
from tiny import write_tokenizer
from whet.errors import ModelError
from whet.model_io.gguf.reader import convert_gguf
from whet.model_io.gguf.tokenizer_writer import tokenizer_metadata
from whet.model_io.gguf.writer import Entry, describe_language_model, gguf_values, pack_file, write_gguf
from whet.storage import write_chunks

VOCAB = 272
TOKENS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6, "tie_word_embeddings": True}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}

# row: (family in transformers, config fields that differ from SIZES, architecture in GGUF)
ROWS = {
    "llama": ("Llama", {}, "llama"),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "llama"),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}, "llama"),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}, "llama"),
    "llama-yarn-attention-factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}, "llama"),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR, "head_dim": 24, "num_key_value_heads": 1}, "llama"),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}, "llama"),
    "mistral-window-of-the-context": ("Mistral", {"sliding_window": 128}, "llama"),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, "llama"),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, "qwen2"),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}, "qwen2"),
    "qwen3": ("Qwen3", {"head_dim": 20}, "qwen3"),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 20}, "qwen3moe"),
    "gemma2": ("Gemma2", GEMMA, "gemma2"),
    "gemma2-pattern-caps": ("Gemma2", {**GEMMA, "layer_types": TYPES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, "gemma2"),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 6}, "gemma3"),
    "gemma3-pattern-scaled": ("Gemma3Text", {**GEMMA, "layer_types": TYPES, "rope_parameters": GEMMA3_ROPE, "final_logit_softcapping": 3.0}, "gemma3"),
    "gemma3-no-windows": ("Gemma3Text", {**GEMMA, "layer_types": ["full_attention"] * 4}, "gemma3"),
    "phi3": ("Phi3", {}, "phi3"),
    "phi3-tied": ("Phi3", {"tie_word_embeddings": True, "num_key_value_heads": 4}, "phi3"),
    "olmo2": ("Olmo2", {}, "olmo2"),
    "olmoe": ("Olmoe", {**EXPERTS, "num_key_value_heads": 4}, "olmoe"),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}, "smollm3"),
    "granite": ("Granite", {"attention_multiplier": 0.1, "logits_scaling": 5.0, "embedding_multiplier": 3.0}, "granite"),
    "granite-biases-tied": ("Granite", {"attention_multiplier": 0.25, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, "granite"),
    "gpt2": ("GPT2", GPT2, "gpt2"),
    "gpt2-untied-wide": ("GPT2", {**GPT2, "n_inner": 96, "tie_word_embeddings": False}, "gpt2"),
}  # fmt: skip


def make_reference(directory, family, differences, **sizes):
    """Write a random transformers model with a tokenizer, and return it."""
    fields = differences if family == "GPT2" else {**SIZES, **sizes, **differences}
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
    randomize(model).save_pretrained(directory)
    write_tokenizer(directory)
    return model


def export(directory, path, kind="f32"):
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    write_gguf(path, model, tokenizer, kind=kind, end_tokens=[256])
    return model


def reorder_rows(weight, heads):
    """Reorder rows for llama.cpp, by index: pair i of a head is rows 2i and 2i+1, not i and i + half."""
    size = weight.shape[0] // heads
    order = [head * size + (row % 2) * (size // 2) + row // 2 for head in range(heads) for row in range(size)]
    return weight[order]


def expected_tensors(directory, model, architecture):
    """Return the tensors by the names of the gguf package, from the files of transformers."""
    from safetensors.torch import load_file

    config = model.config
    blocks = getattr(config, "num_hidden_layers", None) or config.n_layer
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, blocks)
    experts, tensors = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
            continue
        if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if architecture in ("llama", "granite", "smollm3") and "q_proj" in name:
            values = reorder_rows(values, config.num_attention_heads)
        if architecture in ("llama", "granite", "smollm3") and "k_proj" in name:
            values = reorder_rows(values, config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, weights in experts.items():
        stacked = np.stack([weights[index] for index in range(len(weights))])
        tensors[names.get_name(name) + ".weight"] = stacked
    return tensors


@pytest.mark.parametrize("row", ROWS)
def test_family_round_trips(tmp_path, row):
    family, differences, architecture = ROWS[row]
    model = make_reference(tmp_path / "source", family, differences)
    export(tmp_path / "source", tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["general.architecture"].contents() == architecture
    written = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }
    expected = expected_tensors(tmp_path / "source", model, architecture)
    assert written.keys() - {"rope_freqs.weight"} == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(written[name], values, err_msg=name)

    convert_gguf(tmp_path / "out.gguf", tmp_path / "again")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True, **EAGER)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    # and whet writes the same file again
    export(tmp_path / "again", tmp_path / "copy" / "out.gguf")
    copy = gguf.GGUFReader(tmp_path / "copy" / "out.gguf")
    for first, second in zip(reader.tensors, copy.tensors, strict=True):
        np.testing.assert_array_equal(first.data, second.data, err_msg=first.name)
    assert {name: field.contents() for name, field in reader.fields.items()} == {
        name: field.contents() for name, field in copy.fields.items()
    }


# row: (family, config fields, what GGUF would have instead, hint)
REFUSED = {
    "mistral-window": ("Mistral", {"sliding_window": 7}, "attention.window=None instead of 7", "up to 7 tokens"),
    "phi3-window": ("Phi3", {"sliding_window": 7}, "attention.window=None instead of 7", "up to 7 tokens"),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, "blocks.2.attention.window=None instead of 5", "up to 5 tokens"),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}, "attention.bias=False instead of True", "--to hf"),
    "qwen3-moe-scores": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": False}, "renormalise=True instead of False", "--to hf"),
    "qwen3-moe-dense": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}, "blocks.1.feedforward", "--to hf"),
    "gemma2-no-caps": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None}, "softcap=50 instead of None", "--to hf"),
    "gemma2-scale": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 20}, "attention.scale=0.1768 instead of 0.2236", "--to hf"),
    "gemma2-untied": ("Gemma2", {**GEMMA, "tie_word_embeddings": False}, "tied_head=True instead of False", "--to hf"),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True}, "tied_head=False instead of True", "--to hf"),
    "olmoe-grouped": ("Olmoe", EXPERTS, "kv_heads=4 instead of 2", "--to hf"),
    "smollm3-rope": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0]}, "rope", "--to hf"),
    "gpt2-activation": ("GPT2", {**GPT2, "activation_function": "gelu"}, "activation=gelu_tanh instead of gelu", "--to hf"),
    "llama-yarn-betas": ("Llama", {"rope_parameters": {**YARN, "beta_slow": 0.1}}, "rope.frequencies", "--to hf"),
    "qwen2-llama3-rope": ("Qwen2", {"rope_parameters": LLAMA3}, "rope.frequencies", "--to hf"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_what_llama_cpp_would_compute_differently_is_refused(tmp_path, row):
    family, differences, message, hint = REFUSED[row]
    make_reference(tmp_path / "source", family, differences)
    with pytest.raises(ModelError, match=message) as caught:
        export(tmp_path / "source", tmp_path / "out.gguf")
    assert hint in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_custom_decoder_is_exported_as_the_family_that_it_equals(tmp_path):
    make_reference(tmp_path / "source", *ROWS["qwen3"][:2])
    model, tokenizer = whet.load(tmp_path / "source", dtype=torch.float32, device="cpu")
    model.spec = dataclasses.replace(model.spec, family="whet")
    write_gguf(tmp_path / "out.gguf", model, tokenizer, kind="f32")
    assert gguf.GGUFReader(tmp_path / "out.gguf").fields["general.architecture"].contents() == "qwen3"
    model.spec = dataclasses.replace(model.spec, positions="alibi")
    with pytest.raises(ModelError, match="this 'whet' model .*: no architecture of GGUF has the same layers"):
        write_gguf(tmp_path / "other.gguf", model, tokenizer, kind="f32")


def test_window_of_phi3_and_residual_multiplier_of_granite_are_read(tmp_path):
    """llama.cpp's converter writes both; llama.cpp ignores the first, whet runs the second by transformers."""
    for row, key, value, config_key in (
        ("phi3", "phi3.attention.sliding_window", 33, "sliding_window"),
        ("granite", "granite.residual_scale", 0.22, "residual_multiplier"),
    ):
        make_reference(tmp_path / row, *ROWS[row][:2])
        model, tokenizer = whet.load(tmp_path / row, dtype=torch.float32, device="cpu")
        described = describe_language_model(model)
        metadata = {**described.metadata, "general.architecture": row, key: value}
        metadata |= tokenizer_metadata(tokenizer, vocab_size=VOCAB)
        entries = {
            name: Entry(v().shape, gguf.GGMLQuantizationType.F32, v) for name, v in gguf_values(model).items()
        }
        write_chunks(tmp_path / f"{row}.gguf", pack_file(metadata, entries))
        convert_gguf(tmp_path / f"{row}.gguf", tmp_path / f"{row}-again")
        config = json.loads((tmp_path / f"{row}-again" / "config.json").read_text())
        assert config[config_key] == value
