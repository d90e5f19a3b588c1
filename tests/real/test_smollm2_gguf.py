"""A GGUF round trip of a real model: the same weights and the same tokens."""

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer

import whet
from whet.generation.engine import generate_tokens
from whet.generation.generate import encode_prompt
from whet.model_io.gguf.reader import convert_gguf
from whet.model_io.gguf.writer import write_gguf
from whet.models.stop_tokens import config_eos_ids, stop_tokens

HARD = [
    "",
    "  two  spaces\n\n\tand 12345.67",
    "naïve 東京 👩‍👩‍👧 \x00",
    "<|im_start|>user\nhi<|im_end|>",
    "I'LL don't",
]


def test_f16_round_trip_of_smollm2(smollm2_directory, tmp_path):
    model, tokenizer = whet.load(smollm2_directory, dtype=torch.float32, device="cpu")
    (tmp_path / "a").mkdir()
    write_gguf(tmp_path / "a" / "m.gguf", model, tokenizer, kind="f16", end_tokens=config_eos_ids(model))
    convert_gguf(tmp_path / "a" / "m.gguf", tmp_path / "model")
    restored, restored_tokenizer = whet.load(tmp_path / "model", dtype=torch.float32, device="cpu")
    assert restored.spec == model.spec
    ours, theirs = model.state_dict(), restored.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor if tensor.ndim == 1 else tensor.half().float()), name

    original = AutoTokenizer.from_pretrained(smollm2_directory)
    for text in HARD:
        assert restored_tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert restored_tokenizer.chat_template == original.chat_template
    prompts = [encode_prompt(original, text) for text in ("What is the capital of France?", "Say hi.")]
    answers = [
        generate_tokens(
            each_model, prompts, max_tokens=12, stop_tokens=stop_tokens(each_model, each_tokenizer)
        )
        for each_model, each_tokenizer in ((model, original), (restored, restored_tokenizer))
    ]
    assert answers[0] == answers[1]
    assert "Paris" in original.decode(answers[0][0])

    # a second export is byte-identical
    (tmp_path / "b").mkdir()
    write_gguf(
        tmp_path / "b" / "m.gguf",
        restored,
        restored_tokenizer,
        kind="f16",
        end_tokens=config_eos_ids(restored),
    )
    assert (tmp_path / "a" / "m.gguf").read_bytes() == (tmp_path / "b" / "m.gguf").read_bytes()

    write_gguf(tmp_path / "q8.gguf", model, tokenizer, kind="q8_0")
    for tensor in gguf.GGUFReader(tmp_path / "q8.gguf").tensors:
        if tensor.name.endswith("ffn_down.weight"):  # its rows have the order of Hugging Face
            layer = int(tensor.name.split(".")[1])
            expected = ours[f"layers.{layer}.mlp.down_proj.weight"].numpy()
            dequantized = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape)
            largest = np.abs(expected).reshape(-1, 32).max(1)
            error = np.abs(dequantized - expected).reshape(-1, 32).max(1)
            assert (error <= largest * (0.5 / 127 + 2**-10) + 1e-6).all()
