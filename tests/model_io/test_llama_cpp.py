"""llama.cpp opens whet's GGUF files: the same logits, tokens, chat template, and adapters."""

import struct

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import whet
from model_io.hard_strings import hard_strings
from model_io.test_gguf_families import ROWS, SIZES, TOKENS, export, make_reference
from model_io.test_imatrix import write_binary_imatrix
from whet.errors import ModelError
from whet.generation.engine import generate_tokens
from whet.generation.generate import encode_prompt
from whet.model_io.gguf.adapter_writer import write_gguf_adapter
from whet.model_io.gguf.llama_cpp_process import run_llama_cpp
from whet.model_io.gguf.reader import convert_gguf
from whet.model_io.gguf.tokenizer_reader import build_tokenizer, splits
from whet.model_io.gguf.writer import gguf_values, write_gguf
from whet.models.stop_tokens import config_eos_ids

pytest.importorskip("llama_cpp", reason="make test-slow installs it")
pytestmark = pytest.mark.slow

SAMPLE = TOKENS[0].tolist()
# llama.cpp looks GELU up in a table of half-precision values, and these logits are as large as 30
GELU_TOLERANCE = 2e-2


def whet_logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens)[0].numpy()


@pytest.mark.parametrize("row", ROWS)
def test_logits_of_every_family(tmp_path, row):
    family, differences, _ = ROWS[row]
    make_reference(tmp_path / "source", family, differences)
    model = export(tmp_path / "source", tmp_path / "out.gguf")
    [logits] = run_llama_cpp(tmp_path / "out.gguf", token_lists=[SAMPLE]).logits
    tolerance = GELU_TOLERANCE if family.startswith(("Gemma", "GPT2")) else 1e-3
    assert np.abs(logits - whet_logits(model)).max() < tolerance


@pytest.mark.parametrize("row", ["llama", "qwen3", "phi3", "smollm3", "gemma3", "gpt2"])
@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_adapter_of_a_family(tmp_path, row, variant):
    family, differences, _ = ROWS[row]
    make_reference(tmp_path / "source", family, differences)
    model = export(tmp_path / "source", tmp_path / "base.gguf")
    base = whet_logits(model)
    whet.attach_lora(model, rank=4, alpha=12, variant=variant)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name or parameter.requires_grad:
                parameter.normal_(std=0.1)
    write_gguf_adapter(tmp_path / "adapter.gguf", model)
    expected = whet_logits(model)
    assert np.abs(expected - base).max() > 0.1
    output = run_llama_cpp(tmp_path / "base.gguf", token_lists=[SAMPLE], adapter=tmp_path / "adapter.gguf")
    tolerance = GELU_TOLERANCE if family.startswith(("Gemma", "GPT2")) else 1e-3
    assert np.abs(output.logits[0] - expected).max() < tolerance


def weight_error(path, model, name, weights):
    """Return the weighted squared error of a tensor in a file."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return float(((stored - gguf_values(model)[name]()) ** 2 * weights).sum())


def test_k_quants_and_importance_matrix(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    make_reference(tmp_path / "source", "Llama", {}, **sizes)
    model, tokenizer = whet.load(tmp_path / "source", dtype=torch.float32, device="cpu")
    errors, name = [], "blk.0.ffn_up.weight"
    importance = np.geomspace(1, 1e4, 256).astype(np.float32)
    write_binary_imatrix(tmp_path / "i.dat", {name: importance})
    for kind, stored in (("q6_k", "Q6_K"), ("q5_k_m", "Q5_K"), ("q4_k_m", "Q4_K")):
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, model, tokenizer, kind=kind)
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
        assert kinds[name] == stored
        assert kinds["output_norm.weight"] == "F32"
        errors.append(weight_error(path, model, name, 1.0))
        guided = tmp_path / "guided" / path.name
        write_gguf(guided, model, tokenizer, kind=kind, imatrix=tmp_path / "i.dat")
        assert weight_error(guided, model, name, importance) < weight_error(path, model, name, importance)
        # the same weights in whet, whose activations are not rounded
        again, _ = whet.load(path, dtype=torch.float32, device="cpu")
        theirs = torch.from_numpy(run_llama_cpp(path, token_lists=[SAMPLE]).logits[0]).log_softmax(-1)
        ours = torch.from_numpy(whet_logits(again)).log_softmax(-1)
        assert (ours.exp() * (ours - theirs)).sum(-1).mean() < 0.1  # of rows in another order: more than 1
    assert errors == sorted(errors)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_file_that_llama_cpp_rejects_is_an_error(tmp_path):
    make_reference(tmp_path / "source", "Llama", {})
    export(tmp_path / "source", tmp_path / "out.gguf")
    content = (tmp_path / "out.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match="llama.cpp cannot use .*bad.gguf: .*ffn_up.weight"):
        run_llama_cpp(tmp_path / "bad.gguf", token_lists=[SAMPLE])


SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
CORPUS = [*hard_strings(400, seed=1, categories="C"), *(["the thin thing then thanked the thick theme"] * 20)]


def as_transformers(tokenizer):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def train_byte_level(pre):
    split = splits()[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
    tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return as_transformers(tokenizer)


def train_sentencepiece():
    """Return a tokenizer with all merges of each piece, ranked by score, as converted from SentencePiece."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=900))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    built = build_tokenizer(metadata, source="x", vocab_size=len(tokens), max_length=64)
    return as_transformers(built.tokenizer)


def train_unigram():
    """Return a tokenizer like T5's, which merges spaces."""
    tokenizer = Tokenizer(models.Unigram())
    charsmap = struct.pack("<I", 2048) + bytes(2048) + b"\0"  # a trie without entries
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap),
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return as_transformers(tokenizer)


def write_with_tokenizer(directory, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SIZES, "vocab_size": len(tokenizer) + 3, "hidden_size": 32, "num_hidden_layers": 1}
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    model, loaded = whet.load(directory, dtype=torch.float32, device="cpu")
    write_gguf(directory / "out.gguf", model, loaded, kind="f16")
    return directory / "out.gguf"


def compare_tokens(path, tokenizer, texts):
    actual = run_llama_cpp(path, texts=texts).tokens
    wrong = [
        (text, tokenizer.convert_ids_to_tokens(ids), tokenizer.convert_ids_to_tokens(expected))
        for text, ids, expected in zip(
            texts, actual, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True
        )
        if ids != expected
    ]
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[:3]}"


EXACT = ["gpt-2", "olmo", "llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "smollm"]


@pytest.mark.parametrize("pre", [*EXACT, "tekken", "gpt-4o"])
def test_byte_level_tokens(tmp_path, pre):
    tokenizer = train_byte_level(pre)
    path = write_with_tokenizer(tmp_path, tokenizer)
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == pre
    texts = hard_strings(
        special=["<|user|>", "</s>"],
        composed=splits()[pre].normalizer is not None,  # llama.cpp has no normalizer
    )
    if pre not in EXACT:  # llama.cpp's pattern only knows the case of ASCII letters
        texts = [text for text in texts if text.isascii()]
    compare_tokens(path, tokenizer, texts)


def test_sentencepiece_tokens(tmp_path):
    tokenizer = train_sentencepiece()
    path = write_with_tokenizer(tmp_path, tokenizer)
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.model"].contents() == "llama"
    compare_tokens(path, tokenizer, hard_strings(special=["<|user|>"]))


def test_unigram_tokens(tmp_path):
    tokenizer = train_unigram()
    path = write_with_tokenizer(tmp_path, tokenizer)
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.model"].contents() == "t5"
    compare_tokens(path, tokenizer, hard_strings(special=["<|user|>"], categories="C"))


def test_smollm2(smollm2_directory, tmp_path):
    model, tokenizer = whet.load(smollm2_directory, dtype=torch.float32, device="cpu")
    specials = ["<|im_start|>", "<|im_end|>", "<|im_start|>user\n"]
    texts = hard_strings(special=specials)
    questions = [f"{verb} {thing}." for verb in ("Describe", "Name a use of", "Write a line about", "What is") for thing in ("a river", "copper", "the moon", "a fox", "tea")]  # fmt: skip
    prompts = [encode_prompt(tokenizer, question) for question in questions]
    for kind in ("f32", "f16"):
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, model, tokenizer, kind=kind, end_tokens=config_eos_ids(model))
        output = run_llama_cpp(path, texts=texts, token_lists=[prompts[0]], prompts=prompts, new_tokens=16)
        assert output.tokens == tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert output.chat_template == tokenizer.chat_template
        expected = whet_logits(model, torch.tensor([prompts[0]]))
        assert np.abs(output.logits[0] - expected).max() < {"f32": 1e-3, "f16": 0.1}[kind]
        convert_gguf(
            path, tmp_path / kind
        )  # the weights of the file: rounding to f16 may decide a close choice
        stored, _ = whet.load(tmp_path / kind, dtype=torch.float32, device="cpu")
        ours = [generate_tokens(stored, [prompt], max_tokens=16, stop_tokens=set())[0] for prompt in prompts]
        assert output.completions == ours
