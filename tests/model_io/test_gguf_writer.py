"""GGUF out: the gguf package and whet read back the model and the tokenizer that were written."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import whet
from model_io.test_gguf_reader import (
    TRICKY,
    gguf_tensors,
    llama3_rope,
    rope_divisors,
    sentencepiece_metadata,
    tiny_model,
)
from tiny import write_tiny_model, write_tokenizer
from whet.errors import CheckpointError, ConfigError, ModelError
from whet.model_io.gguf.reader import convert_gguf
from whet.model_io.gguf.tokenizer_reader import build_tokenizer
from whet.model_io.gguf.tokenizer_writer import tokenizer_metadata
from whet.model_io.gguf.writer import write_gguf
from whet.models.from_scratch.train_tokenizer import make_tokenizer

TOKENS = torch.arange(100).reshape(2, 50)


def saved(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def written(tmp_path: Path, model: Any, kind: str = "f32") -> Path:
    """A transformers model, through whet, as a GGUF file."""
    ours, tokenizer = whet.load(saved(tmp_path / "source", model), dtype=torch.float32, device="cpu")
    write_gguf(tmp_path / "out.gguf", ours, tokenizer, kind=kind)
    return tmp_path / "out.gguf"


def read_by_gguf(path: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"head_dim": 64, "rope_parameters": llama3_rope()},
    ],
    ids=["tied", "untied", "biases", "wide heads", "no grouping", "linear", "yarn", "llama3"],
)
def test_a_float32_file_holds_exactly_the_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny_model(**changes)
    path = written(tmp_path, model)
    expected = gguf_tensors(model)
    if "llama3" in str(changes):
        expected["rope_freqs.weight"] = rope_divisors(model)
    found = read_by_gguf(path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5 if name == "rope_freqs.weight" else 0)
    convert_gguf(path, tmp_path / "again")
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "again")(TOKENS).logits
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
        if "llama3" not in str(changes):
            assert torch.equal(logits, model(TOKENS).logits)


def test_the_metadata_is_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    model = tiny_model()
    reader = gguf.GGUFReader(written(tmp_path, model, "q8_0"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert next(iter(key for key in fields if not key.startswith("GGUF."))) == "general.architecture"
    expected = {
        "general.architecture": "llama",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 50000.0,
        "llama.vocab_size": model.config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.padding_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: fields[key] for key in expected} == expected
    assert abs(fields["llama.attention.layer_norm_rms_epsilon"] - 1e-5) < 1e-12
    assert fields["tokenizer.chat_template"].startswith("{% for m in messages %}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == model.config.vocab_size  # llama.cpp wants a token for every row
    assert tokens[256:261] == ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "[UNUSED260]"]
    assert types[255:261] == [1, 3, 3, 3, 3, 5]
    assert reader.fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32
    assert reader.fields["llama.block_count"].types == [gguf.GGUFValueType.UINT32]


# of the largest in a block of 32; blocks have their scale in fp16, and q4_0 has no +8
STEPS = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11, "q4_0": 1 / 8 + 2**-11}


@pytest.mark.parametrize("kind", STEPS)
def test_each_type_is_within_its_step_and_norms_stay_exact(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    path = written(tmp_path, model, kind)
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    found = read_by_gguf(path)
    for name, values in gguf_tensors(model).items():
        if values.ndim == 1:
            assert stored[name] == Kind.F32
            assert np.array_equal(found[name], values)
            continue
        in_embedding = kind == "q4_0" and name == "token_embd.weight"
        assert stored[name] == (Kind.Q8_0 if in_embedding else Kind[kind.upper()])
        largest = np.abs(values).reshape(-1, 32).max(1)
        error = np.abs(found[name] - values).reshape(-1, 32).max(1)
        assert (error <= largest * STEPS["q8_0" if in_embedding else kind] * 1.01 + 1e-7).all(), name
        assert error.max() > 0
        if kind == "f16":
            assert np.array_equal(found[name], values.astype(np.float16).astype(np.float32))
    convert_gguf(path, tmp_path / "again")  # and whet reads the same numbers
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert np.array_equal(again["model.layers.1.mlp.down_proj.weight"], found["blk.1.ffn_down.weight"])


def test_rows_that_blocks_of_32_do_not_fit_are_stored_as_f16(tmp_path: Path) -> None:
    path = written(tmp_path, tiny_model(intermediate_size=72), "q8_0")
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.ffn_down.weight"] == Kind.F16
    assert stored["blk.0.ffn_up.weight"] == Kind.Q8_0


def test_a_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None)).eval()
    convert_gguf(written(tmp_path, model), tmp_path / "again")
    with torch.no_grad():
        again = LlamaForCausalLM.from_pretrained(tmp_path / "again")(TOKENS).logits
        torch.testing.assert_close(again, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    windowed = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8))
    with pytest.raises(ModelError, match="this 'mistral' model is no llama"):
        written(tmp_path / "windowed", windowed)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=270, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip
    with pytest.raises(ModelError, match="this 'qwen3' model is no llama") as caught:
        written(tmp_path, Qwen3ForCausalLM(config))
    assert "--to hf" in str(caught.value.hint)


def test_what_cannot_be_held_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    ours, tokenizer = whet.load(saved(tmp_path / "source", tiny_model()), dtype=torch.float32, device="cpu")
    out = tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match="unknown GGUF type 'q5_9'"):
        write_gguf(out, ours, tokenizer, kind="q5_9")
    with pytest.raises(ModelError, match="this model has none"):
        write_gguf(out, ours, None, kind="f16")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    with pytest.raises(
        ModelError, match=r"layers.0.mlp.up_proj.weight holds numbers that F16 cannot.* 1e\+06"
    ):
        write_gguf(out, ours, tokenizer, kind="f16")
    with pytest.raises(ModelError, match=r"up_proj.weight holds numbers that Q4_0 cannot"):
        write_gguf(out, ours, tokenizer, kind="q4_0")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"the largest is nan"):
        write_gguf(out, ours, tokenizer, kind="bf16")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    write_gguf(tmp_path / "bf16.gguf", ours, tokenizer, kind="bf16")
    with pytest.raises(CheckpointError, match="never overwrites existing files"):
        write_gguf(tmp_path / "bf16.gguf", ours, tokenizer, kind="bf16")
    whet.attach_lora(ours)
    with pytest.raises(ModelError, match="fold its adapter in first"):
        write_gguf(out, ours, tokenizer, kind="f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16.gguf", "source"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    ours, tokenizer = whet.load(saved(tmp_path / "source", tiny_model()), dtype=torch.float32, device="cpu")

    def full(path: Path, chunks: Any) -> None:
        with path.open("wb") as file:
            file.write(next(iter(chunks)))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whet.model_io.gguf.writer.write_chunks", full)
    with pytest.raises(OSError, match="No space"):
        write_gguf(tmp_path / "out.gguf", ours, tokenizer, kind="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def rebuilt(tokenizer: Any, rows: int = 0) -> Any:
    """A tokenizer through GGUF's metadata and back."""
    size = rows or len(tokenizer)
    metadata = tokenizer_metadata(tokenizer, vocab_size=size)
    return build_tokenizer(metadata, where="x.gguf", vocab_size=size, max_length=64)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_tokenizers_of_whets_own_make_come_back(spec: str) -> None:
    tokenizer = make_tokenizer(spec, ["the thin thing then thanked the thick theme"] * 3)
    again = rebuilt(tokenizer, len(tokenizer) + 5).tokenizer
    for text in TRICKY:
        assert again.encode(text).ids == tokenizer(text)["input_ids"]
    assert again.get_vocab_size() == len(tokenizer)  # rows without a token are none


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_each_way_of_splitting_is_recognised(pre: str) -> None:
    from model_io.test_gguf_reader import byte_level_metadata

    first = build_tokenizer(byte_level_metadata(pre=pre), where="x", vocab_size=300, max_length=64)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=first.tokenizer, bos_token="<|user|>", eos_token="<|end|>"
    )
    metadata = tokenizer_metadata(fast, vocab_size=266)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 4, 1]
    assert metadata["tokenizer.ggml.add_bos_token"] is (pre == "llama-bpe")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_comes_back_from_its_merges(prefix: bool) -> None:
    original = sentencepiece_metadata(add_space_prefix=prefix)
    first = build_tokenizer(original, where="x", vocab_size=400, max_length=64)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=first.tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    metadata = tokenizer_metadata(fast, vocab_size=280)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.token_type"][:274] == original["tokenizer.ggml.token_type"]
    assert metadata["tokenizer.ggml.tokens"][:274] == original["tokenizer.ggml.tokens"]
    again = build_tokenizer(metadata, where="y", vocab_size=280, max_length=64).tokenizer
    for text in [*TRICKY, "abcab aab", "<s>a b</s>", "< x>"]:
        assert again.encode(text).ids == first.tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("ends", "kept", "said"),
    [
        ({256, 258}, [256, 258], []),
        ({5, 256, 258}, [256, 5, 258], []),
        ({5, 7, 9, 256, 258}, [256, 5, 7], ["GGUF has no place for more ends of an answer: 9, 258"]),
    ],
)
def test_the_ends_of_a_turn_and_of_a_message_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: set[int], kept: list[int], said: list[str]
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    metadata = tokenizer_metadata(tokenizer, vocab_size=260, end_tokens=ends)
    ids = build_tokenizer(metadata, where="x", vocab_size=260, max_length=8).ids
    assert ids["eos_token_id"] == kept
    assert [record.message for record in caplog.records] == said


def test_tokenizers_that_gguf_cannot_hold_are_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    with pytest.raises(ModelError, match="this one is WordLevel"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=words), vocab_size=2)
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="the tokenizer has a token 259, and the model 200 rows"):
        tokenizer_metadata(tokenizer, vocab_size=200)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    odd = Tokenizer.from_str(json.dumps(described))
    odd.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="no name for the way in which this tokenizer splits"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=odd), vocab_size=260)
    described["model"]["vocab"] |= {"th": 260}
    described["model"]["merges"] = [["t", "h"]]
    odd = Tokenizer.from_str(json.dumps(described))
    odd.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ModelError, match="no name for the way"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=odd), vocab_size=261)


@pytest.mark.parametrize("length", [32, 64, 100, 3000, 8192])
def test_llama3_scaling_for_any_length_is_read_back(length, tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": length}
    write_tiny_model(tmp_path / "base", rope_parameters=scaling)
    model, tokenizer = whet.load(tmp_path / "base", dtype=torch.float32, device="cpu")
    write_gguf(tmp_path / "x.gguf", model, tokenizer, kind="f32", end_tokens={256})
    again, _ = whet.load(tmp_path / "x.gguf", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
