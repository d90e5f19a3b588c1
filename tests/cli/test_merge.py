"""whet merge: written models, output and errors."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import whet
from tiny_adapters import adapter_tensors


@pytest.fixture(scope="module")
def bf16_directory(tiny_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bf16") / "tiny"
    shutil.copytree(tiny_directory, directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_run(base, directory, *, scale=0.2):
    """A finished LoRA run, as far as merging looks at it."""
    model, tokenizer = whet.load(base, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=3)
    generator = torch.Generator().manual_seed(1)
    for tensor in adapter_tensors(model).values():
        tensor.data = scale * torch.randn(tensor.shape, generator=generator)
    whet.save_adapter(model, directory / "final", tokenizer=tokenizer)
    return directory


def test_merge_uses_base_dtype_and_prints_logit_difference(cli, bf16_directory, tmp_path):
    run = write_run(bf16_directory, tmp_path / "run")
    code, out, err = cli("merge", run, "--out", tmp_path / "merged", "--tolerance", 3)
    assert code == 0, err
    assert f"merged into {bf16_directory} in bfloat16: largest logit difference " in out
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        adapted = whet.load(run, dtype=torch.float32, device="cpu")[0](tokens)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(tokens).logits
    assert 0 < (merged - adapted).abs().max() < 3


def test_merge_above_tolerance_writes_nothing(cli, bf16_directory, tmp_path):
    run = write_run(bf16_directory, tmp_path / "run")
    code, _, err = cli("merge", run, "--out", tmp_path / "merged", "--tolerance", 1e-6)
    assert code == 1
    assert "in bfloat16 changes its outputs too much" in err
    assert "(tolerance 1e-06)" in err
    assert "--dtype float32" in err
    assert not (tmp_path / "merged").exists()
    code, out, err = cli("merge", run, "--out", tmp_path / "merged", "--dtype", "float32")
    assert code == 0, err
    assert "in float32: largest logit difference" in out


def test_merge_several_models(cli, tiny_directory, bf16_directory, tmp_path):
    run = write_run(tiny_directory, tmp_path / "run")
    code, out, err = cli(
        "merge", "--method", "ties", run, bf16_directory, "--base", tiny_directory, "--out", tmp_path / "merged",
        "--weights", "1,0.5", "--density", "0.3",
    )  # fmt: skip
    assert code == 0, err
    assert out.startswith(f"ties of 1 {run}, 0.5 {bf16_directory}")
    whet.load(tmp_path / "merged")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["A", "A"], "merging 2 models needs --method"),
        (["A"], "has no adapter: it is already a full model"),
        (["A", "--weights", "1"], "--weights needs --method"),
        (["A", "A", "--method", "average", "--tolerance", "1"], "--tolerance is for merging one adapter"),
        (["A", "A", "--method", "average", "--weights", "1,x"], "--weights 1,x is not a list of numbers"),
        (["A", "A", "--method", "average", "--weights", "1,1"], "must sum to 1, but 1, 1 sum to 2"),
        (["A", "A", "--method", "avrage"], "avrage"),
        (["A", "./nowhere", "--method", "average"], "nowhere does not exist"),
    ],
)
def test_invalid_input_prints_one_message_and_exits_2(cli, tiny_directory, tmp_path, arguments, message):
    words = [tiny_directory if word == "A" else word for word in arguments]
    code, _, err = cli("merge", *words, "--out", tmp_path / "out")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
