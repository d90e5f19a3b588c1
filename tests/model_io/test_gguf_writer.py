"""Writing GGUF: the gguf package and whet read back the same model and tokenizer."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
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
from model_io.test_imatrix import write_binary_imatrix
from tiny import write_tiny_model, write_tokenizer
from whet.errors import CheckpointError, ConfigError, ModelError
from whet.model_io.gguf.reader import convert_gguf
from whet.model_io.gguf.tokenizer_reader import build_tokenizer
from whet.model_io.gguf.tokenizer_writer import tokenizer_metadata
from whet.model_io.gguf.writer import write_gguf
from whet.models.from_scratch.train_tokenizer import make_tokenizer

TOKENS = torch.arange(100).reshape(2, 50)


def save_with_tokenizer(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def export_gguf(tmp_path: Path, model: Any, kind: str = "f32") -> Path:
    """Load a transformers model with whet and write it as a GGUF file."""
    ours, tokenizer = whet.load(
        save_with_tokenizer(tmp_path / "source", model), dtype=torch.float32, device="cpu"
    )
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
def test_float32_file_contains_the_exact_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny_model(**changes)
    path = export_gguf(tmp_path, model)
    expected = gguf_tensors(model)
    if "llama3" in str(changes):
        expected["rope_freqs.weight"] = rope_divisors(model)
    actual = read_by_gguf(path)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5 if name == "rope_freqs.weight" else 0)
    convert_gguf(path, tmp_path / "reloaded")
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "reloaded")(TOKENS).logits
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
        if "llama3" not in str(changes):
            assert torch.equal(logits, model(TOKENS).logits)


def test_metadata_has_the_keys_of_llama_cpp(tmp_path: Path) -> None:
    model = tiny_model()
    reader = gguf.GGUFReader(export_gguf(tmp_path, model, "q8_0"))
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
    assert len(tokens) == len(types) == model.config.vocab_size  # llama.cpp needs a token for every row
    assert tokens[256:261] == ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "[UNUSED260]"]
    assert types[255:261] == [1, 3, 3, 3, 3, 5]
    assert reader.fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32
    assert reader.fields["llama.block_count"].types == [gguf.GGUFValueType.UINT32]


# relative to the largest value in a block of 32; scales are fp16, and q4_0 has no code +8
MAX_ERRORS = {
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.5 / 127 + 2**-11,
    "q5_1": 1 / 31 + 3 * 2**-11,
    "q5_0": 1 / 16 + 2**-11,
    "q4_1": 1 / 15 + 3 * 2**-11,
    "q4_0": 1 / 8 + 2**-11,
}


@pytest.mark.parametrize("kind", MAX_ERRORS)
def test_types_are_within_their_error_and_norms_are_exact(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    path = export_gguf(tmp_path, model, kind)
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    actual = read_by_gguf(path)
    for name, values in gguf_tensors(model).items():
        if values.ndim == 1:
            assert stored[name] == Kind.F32
            assert np.array_equal(actual[name], values)
            continue
        in_embedding = kind.startswith("q4") and name == "token_embd.weight"
        assert stored[name] == (Kind.Q8_0 if in_embedding else Kind[kind.upper()])
        largest = np.abs(values).reshape(-1, 32).max(1)
        error = np.abs(actual[name] - values).reshape(-1, 32).max(1)
        assert (error <= largest * MAX_ERRORS["q8_0" if in_embedding else kind] * 1.01 + 1e-7).all(), name
        assert error.max() > 0
        if kind == "f16":
            assert np.array_equal(actual[name], values.astype(np.float16).astype(np.float32))
    convert_gguf(path, tmp_path / "reloaded")  # whet reads the same values
    reloaded = load_file(tmp_path / "reloaded" / "model.safetensors")
    assert np.array_equal(reloaded["model.layers.1.mlp.down_proj.weight"], actual["blk.1.ffn_down.weight"])


def test_rows_not_divisible_by_32_are_stored_as_f16(tmp_path: Path) -> None:
    path = export_gguf(tmp_path, tiny_model(intermediate_size=72), "q8_0")
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.ffn_down.weight"] == Kind.F16
    assert stored["blk.0.ffn_up.weight"] == Kind.Q8_0


def test_mistral_without_a_window_is_exported_as_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None)).eval()
    convert_gguf(export_gguf(tmp_path, model), tmp_path / "reloaded")
    with torch.no_grad():
        reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "reloaded")(TOKENS).logits
        torch.testing.assert_close(reloaded, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    windowed = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8))
    with pytest.raises(ModelError, match="this 'mistral' model cannot be exported to GGUF"):
        export_gguf(tmp_path / "windowed", windowed)


def test_model_that_runs_through_transformers_is_rejected(tmp_path: Path) -> None:
    sizes = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    with pytest.raises(ModelError, match="this 'cohere' model cannot be exported to GGUF: .* transformers") as caught:  # fmt: skip
        export_gguf(tmp_path, CohereForCausalLM(CohereConfig(**sizes)))
    assert "--to hf" in str(caught.value.hint)


def test_unrepresentable_models_are_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    ours, tokenizer = whet.load(
        save_with_tokenizer(tmp_path / "source", tiny_model()), dtype=torch.float32, device="cpu"
    )
    out = tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match="unknown GGUF type 'q5_9'"):
        write_gguf(out, ours, tokenizer, kind="q5_9")
    with pytest.raises(ModelError, match="this model has none"):
        write_gguf(out, ours, None, kind="f16")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    with pytest.raises(
        ModelError, match=r"layers.0.mlp.up_proj.weight has values that F16 cannot represent.* 1e\+06"
    ):
        write_gguf(out, ours, tokenizer, kind="f16")
    with pytest.raises(ModelError, match=r"up_proj.weight has values that Q4_0 cannot represent"):
        write_gguf(out, ours, tokenizer, kind="q4_0")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"the largest is nan"):
        write_gguf(out, ours, tokenizer, kind="bf16")
    ours.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    write_gguf(tmp_path / "bf16.gguf", ours, tokenizer, kind="bf16")
    with pytest.raises(CheckpointError, match="never overwrites existing files"):
        write_gguf(tmp_path / "bf16.gguf", ours, tokenizer, kind="bf16")
    whet.attach_lora(ours)
    with pytest.raises(ModelError, match="merge its adapter first"):
        write_gguf(out, ours, tokenizer, kind="f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16.gguf", "source"]


def test_importance_matrix_and_missing_llama_cpp_are_rejected_before_writing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    ours, tokenizer = whet.load(
        save_with_tokenizer(tmp_path / "source", tiny_model()), dtype=torch.float32, device="cpu"
    )
    out = tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match="an importance matrix only applies to k-quants, not to q4_0"):
        write_gguf(out, ours, tokenizer, kind="q4_0", imatrix=tmp_path / "i.dat")
    monkeypatch.setattr("whet.model_io.gguf.llama_cpp_process.has_llama_cpp", lambda: False)
    with pytest.raises(ConfigError, match="the GGUF type q4_k_m needs llama.cpp, but") as caught:
        write_gguf(out, ours, tokenizer, kind="q4_k_m")
    assert caught.value.hint == "pip install 'whet[llama-cpp]'"
    monkeypatch.setattr("whet.model_io.gguf.llama_cpp_process.has_llama_cpp", lambda: True)
    for values, message in (
        (
            {"blk.0.ffn_up.weight": 8},
            "is of another model: blk.0.ffn_up.weight has 8 inputs there, and 64 here",
        ),
        ({"blk.9.ffn_up.weight": 64}, "is of another model: it has no tensor of this one"),
    ):
        write_binary_imatrix(tmp_path / "i.dat", {name: np.ones(size) for name, size in values.items()})
        with pytest.raises(ModelError, match=message):
            write_gguf(out, ours, tokenizer, kind="q4_k_m", imatrix=tmp_path / "i.dat")
    assert not out.exists()


def test_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: Any) -> None:
    ours, tokenizer = whet.load(
        save_with_tokenizer(tmp_path / "source", tiny_model()), dtype=torch.float32, device="cpu"
    )

    def fail_with_full_disk(path: Path, chunks: Any) -> None:
        with path.open("wb") as file:
            file.write(next(iter(chunks)))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whet.model_io.gguf.writer.write_chunks", fail_with_full_disk)
    with pytest.raises(OSError, match="No space"):
        write_gguf(tmp_path / "out.gguf", ours, tokenizer, kind="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def round_trip(tokenizer: Any, rows: int = 0) -> Any:
    """Convert a tokenizer to GGUF metadata and back."""
    size = rows or len(tokenizer)
    metadata = tokenizer_metadata(tokenizer, vocab_size=size)
    return build_tokenizer(metadata, source="x.gguf", vocab_size=size, max_length=64)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_tokenizers_trained_by_whet_round_trip(spec: str) -> None:
    tokenizer = make_tokenizer(spec, ["the thin thing then thanked the thick theme"] * 3)
    reloaded = round_trip(tokenizer, len(tokenizer) + 5).tokenizer
    for text in TRICKY:
        assert reloaded.encode(text).ids == tokenizer(text)["input_ids"]
    assert reloaded.get_vocab_size() == len(tokenizer)  # rows without a token are not tokens


@pytest.mark.parametrize(
    "pre", ["gpt-2", "olmo", "llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "smollm", "tekken", "gpt-4o"]
)
def test_pre_tokenizers_are_recognized(pre: str) -> None:
    from model_io.test_gguf_reader import byte_level_metadata

    first = build_tokenizer(byte_level_metadata(pre=pre), source="x", vocab_size=300, max_length=64)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=first.tokenizer, bos_token="<|user|>", eos_token="<|end|>"
    )
    metadata = tokenizer_metadata(fast, vocab_size=266)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 4, 1]
    assert metadata["tokenizer.ggml.add_bos_token"] is (pre == "llama-bpe")


def test_removing_everything_but_the_matches_is_the_same_split() -> None:
    """As in the files of OLMo 2 and Phi-4."""
    from model_io.test_gguf_reader import byte_level_metadata

    first = build_tokenizer(byte_level_metadata(pre="dbrx"), source="x", vocab_size=300, max_length=64)
    tokenizer_json = json.loads(first.tokenizer.to_str())
    tokenizer_json["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)))
    assert tokenizer_metadata(fast, vocab_size=266)["tokenizer.ggml.pre"] == "dbrx"


def test_name_follows_how_special_tokens_treat_spaces() -> None:
    """llama.cpp removes the spaces after special tokens if the name of the model contains phi-3."""
    from model_io.test_gguf_reader import byte_level_metadata

    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    metadata = byte_level_metadata(pre="gpt-2")
    metadata["tokenizer.ggml.tokens"][:4] = tokens
    metadata["general.name"] = "Phi-3"
    removing = build_tokenizer(metadata, source="x", vocab_size=300, max_length=64).tokenizer
    letter, space = removing.token_to_id("a"), removing.token_to_id("Ġ")
    assert removing.encode("</s>  a").ids == [2, letter]
    assert removing.encode("<s> a").ids == [1, space, letter]
    written = tokenizer_metadata(
        PreTrainedTokenizerFast(tokenizer_object=removing), vocab_size=266, name="mine"
    )
    assert written["general.name"] == "mine (Phi-3)"
    metadata["general.name"] = "mine"
    plain = build_tokenizer(metadata, source="x", vocab_size=300, max_length=64).tokenizer
    written = tokenizer_metadata(
        PreTrainedTokenizerFast(tokenizer_object=plain), vocab_size=266, name="my-Phi3"
    )
    assert written["general.name"] == "my-phi_3"


def unigram_tokenizer(*, charsmap: bytes | None = None) -> PreTrainedTokenizerFast:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), *((letter, -4.0) for letter in "abcdexyz!.")]
    pieces += [("▁ab", -2.5), ("abc", -2.0), ("▁abc", -2.75), ("de", -3.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [
            *steps,
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_unigram_tokenizer_round_trips_with_its_scores() -> None:
    charsmap = struct.pack("<I", 2048) + bytes(2048) + b"\0"  # a trie without entries
    tokenizer = unigram_tokenizer(charsmap=charsmap)
    metadata = tokenizer_metadata(tokenizer, vocab_size=20)
    assert metadata["tokenizer.ggml.precompiled_charsmap"] == charsmap
    assert metadata["tokenizer.ggml.model"] == "t5"
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert metadata["tokenizer.ggml.scores"][2:4] == [-3.0, -4.0]
    assert metadata["tokenizer.ggml.token_type"] == [2, 3] + [1] * 15 + [5] * 3
    reloaded = build_tokenizer(metadata, source="x", vocab_size=20, max_length=64).tokenizer
    for text in (*TRICKY, "abcde  abc! zzz", "</s> abc"):
        assert reloaded.encode(text).ids == tokenizer(text)["input_ids"], text


def test_unrepresentable_unigram_tokenizers_are_rejected() -> None:
    tokenizer_json = json.loads(unigram_tokenizer().backend_tokenizer.to_str())
    tokenizer_json["normalizer"] = (
        None  # llama.cpp adds a space to a text that starts with one, this does not
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)))
    with pytest.raises(ModelError, match="cannot represent this tokenizer: ' ' has the ids"):
        tokenizer_metadata(fast, vocab_size=20)
    tokenizer_json["model"]["byte_fallback"] = True
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)))
    with pytest.raises(ModelError, match="has no tokens for single bytes"):
        tokenizer_metadata(fast, vocab_size=20)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_round_trips_through_its_merges(prefix: bool) -> None:
    original = sentencepiece_metadata(add_space_prefix=prefix)
    first = build_tokenizer(original, source="x", vocab_size=400, max_length=64)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=first.tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    metadata = tokenizer_metadata(fast, vocab_size=280)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.token_type"][:274] == original["tokenizer.ggml.token_type"]
    assert metadata["tokenizer.ggml.tokens"][:274] == original["tokenizer.ggml.tokens"]
    reloaded = build_tokenizer(metadata, source="y", vocab_size=280, max_length=64).tokenizer
    for text in [*TRICKY, "abcab aab", "<s>a b</s>", "< x>"]:
        assert reloaded.encode(text).ids == first.tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("ends", "stored", "warnings"),
    [
        ({256, 258}, [256, 258], []),
        ({5, 256, 258}, [256, 5, 258], []),
        (
            {5, 7, 9, 256, 258},
            [256, 5, 7],
            ["GGUF cannot store these additional end tokens, which will not stop generation: 9, 258"],
        ),
    ],
)
def test_end_of_turn_and_end_of_message_tokens_are_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: set[int], stored: list[int], warnings: list[str]
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    metadata = tokenizer_metadata(tokenizer, vocab_size=260, end_tokens=ends)
    ids = build_tokenizer(metadata, source="x", vocab_size=260, max_length=8).ids
    assert ids["eos_token_id"] == stored
    assert [record.message for record in caplog.records] == warnings


def test_unrepresentable_tokenizers_are_rejected(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    with pytest.raises(ModelError, match="this one is WordLevel"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=words), vocab_size=2)
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="the tokenizer has a token 259, but the embedding has only 200 rows"
    ):
        tokenizer_metadata(tokenizer, vocab_size=200)
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    unsupported = Tokenizer.from_str(json.dumps(tokenizer_json))
    unsupported.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="no name for the pre-tokenizer of this tokenizer"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=unsupported), vocab_size=260)
    tokenizer_json["model"]["vocab"] |= {"th": 260}
    tokenizer_json["model"]["merges"] = [["t", "h"]]
    unsupported = Tokenizer.from_str(json.dumps(tokenizer_json))
    unsupported.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ModelError, match="no name for the pre-tokenizer"):
        tokenizer_metadata(PreTrainedTokenizerFast(tokenizer_object=unsupported), vocab_size=261)


@pytest.mark.parametrize("length", [32, 64, 100, 3000, 8192])
def test_llama3_scaling_of_any_length_round_trips(length, tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": length}
    write_tiny_model(tmp_path / "base", rope_parameters=scaling)
    model, tokenizer = whet.load(tmp_path / "base", dtype=torch.float32, device="cpu")
    write_gguf(tmp_path / "x.gguf", model, tokenizer, kind="f32", end_tokens={256})
    reloaded, _ = whet.load(tmp_path / "x.gguf", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(reloaded(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
