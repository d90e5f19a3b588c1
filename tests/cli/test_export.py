"""whet export: every layout loads in its library with the same logits, and --check detects differences."""

import json
import os
import shutil
import subprocess
from importlib.util import find_spec

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import whet
from tiny import run_config, write_tiny_model, write_tokenizer
from whet.model_io.export.export_check import check_export
from whet.model_io.export.export_model import load_for_export, write_export
from whet.model_io.formats.adapter_files import LAYOUTS
from whet.model_io.load import load_base

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def trained(tiny_directory, tmp_path_factory):
    """A finished LoRA run that has moved away from its base."""
    config = run_config(tiny_directory, tmp_path_factory.mktemp("export"), optim={"lr": 3e-2})
    return whet.train(config).directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def logits_of(model):
    with torch.no_grad():
        output = model(TOKENS)
    return getattr(output, "logits", output)


def adapted_logits(run):
    return logits_of(whet.load(run, dtype=torch.float32, device="cpu")[0])


def test_hf_export_merges_the_adapter(cli, run):
    code, out, err = cli("export", run, "--to", "hf", "--check")
    assert code == 0, out + err
    assert "in float32: largest logit difference" in out
    assert "checked: transformers: largest logit difference" in out
    exported = run / "export" / "hf"
    assert str(exported) in out
    again = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    torch.testing.assert_close(logits_of(again), adapted_logits(run), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(exported).chat_template


@pytest.mark.parametrize("layout", ["hf", "peft", "gguf"])
def test_leftovers_of_a_killed_export_are_removed(cli, run, layout):
    """Only its own: neither another target's, nor that of a process that is still writing."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    exports = run / "export"
    name = {"gguf": "run-f32.gguf"}.get(layout, layout)
    left = exports / f".{name}.writing-{ended.pid}"
    others = [exports / f".other.writing-{ended.pid}", exports / f".{name}.writing-{os.getppid()}"]
    for path in [left, *others]:
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"x" * 1000)
    code, out, err = cli("export", run, "--to", layout, "--out", exports / name)
    assert code == 0, out + err
    assert (exports / name).exists()
    assert not left.exists()
    assert all(path.exists() for path in others)


def test_hf_export_in_another_dtype(cli, run, tmp_path):
    out_directory = tmp_path / "narrow"
    code, out, err = cli(
        "export", run, "--to", "hf", "--dtype", "bfloat16", "--out", out_directory, "--check"
    )
    assert code == 0, out + err
    assert "in bfloat16" in out
    assert {t.dtype for t in load_file(out_directory / "model.safetensors").values()} == {torch.bfloat16}


def test_adapter_of_4_bit_base_is_checked_on_the_dequantized_base(cli, tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, method={"kind": "qlora", "rank": 4}, optim={"lr": 3e-2})
    code, out, err = cli("export", whet.train(config).directory, "--to", "peft", "--check")
    assert code == 0, out + err
    assert "checked: PEFT on the dequantized base: largest logit difference" in out


def test_peft_export_is_the_adapter(cli, run, tiny_directory):
    code, out, err = cli("export", run, "--to", "peft", "--check")
    assert code == 0, out + err
    assert "checked: PEFT: largest logit difference" in out
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, run / "export" / "peft")
    with torch.no_grad():
        logits = loaded(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, adapted_logits(run), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_gguf_export_loads_as_a_model(cli, run, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    code, out, err = cli("export", run, "--to", "gguf", "--type", kind, "--check")
    assert code == 0, out + err
    for expected in ("checked: gguf: 20 tensors", "checked: read back by whet", "checked: tokens equal"):
        assert expected in out
    if find_spec("llama_cpp") is None:
        assert "not checked: llama.cpp: llama-cpp-python is not installed" in out
    path = run / "export" / f"run-{kind}.gguf"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up.weight"] == kind.upper()
    again, tokenizer = whet.load(path, dtype=torch.float32, device="cpu")
    difference = (logits_of(again) - adapted_logits(run)).abs().max()
    assert difference < {"f16": 0.02, "bf16": 0.3, "q8_0": 0.3, "q4_0": 6.0}[kind]
    chat = [{"role": "user", "content": "Dim the lamp"}]
    shown = AutoTokenizer.from_pretrained(run / "final").apply_chat_template(chat, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == shown
    assert sorted(path.parent.iterdir()) == [path]  # nothing of the check is left


def test_adapter_export_of_a_gguf_base_needs_a_directory(cli, run, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    assert "needs the base" not in cli("export", run, "--to", "peft")[1]
    cli("export", tiny_directory, "--to", "gguf", "--out", tmp_path / "start.gguf")
    result = whet.train(run_config(tmp_path / "start.gguf", tmp_path))
    code, out, err = cli("export", result.directory, "--to", "peft", "--check")
    assert code == 0, out + err
    line = (
        f"PEFT needs the base model as a directory: whet export {tmp_path / 'start.gguf'} --to hf --out DIR"
    )
    assert line in out.splitlines()
    assert "mlx-lm needs the base" in cli("export", result.directory, "--to", "mlx")[1]
    code, out, err = cli("export", tmp_path / "start.gguf", "--to", "hf", "--out", tmp_path / "base")
    assert code == 0, out + err
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, result.directory / "export" / "peft")
    torch.testing.assert_close(logits_of(theirs), adapted_logits(result.directory), rtol=1e-4, atol=1e-4)


def test_gguf_round_trip_through_fine_tuning(cli, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    code, out, err = cli("export", tiny_directory, "--to", "gguf", "--out", tmp_path / "start.gguf")
    assert code == 0, out + err
    result = whet.train(run_config(tmp_path / "start.gguf", tmp_path))
    code, out, err = cli("export", result.directory, "--to", "gguf", "--type", "q8_0", "--check")
    assert code == 0, out + err
    [path] = (result.directory / "export").iterdir()
    assert path.name == "test-q8_0.gguf"
    code, out, err = cli("generate", path, "Dim the lamp", "--max-tokens", 3)
    assert code == 0, out + err


def test_full_fine_tune_is_exported_as_a_model(cli, tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, run={"steps": 1}) | {"method": {"kind": "full"}}
    run = whet.train(config).directory
    assert cli("export", run, "--to", "gguf", "--check")[0] == 0
    assert cli("export", run, "--to", "hf", "--check")[0] == 0
    for layout in ("peft", "mlx"):
        code, _, err = cli("export", run, "--to", layout)
        assert code == 2
        assert f"has no adapter, but the {layout} layout is for adapters only" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx"], "onnx"),
        (["--to", "hf", "--type", "f16"], "--type only applies to --to gguf"),
        (["--to", "peft", "--dtype", "float16"], "--dtype only applies to --to hf"),
        (["--to", "hf"], "is not a run, so there is no default path for the export"),
    ],
)
def test_invalid_input_prints_one_message_and_exits_2(cli, tiny_directory, arguments, message):
    code, _, err = cli("export", tiny_directory, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_gguf_export_rejects_unsupported_family(cli, tmp_path):
    config = Qwen3Config(vocab_size=270, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=True)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    write_tokenizer(tmp_path / "qwen")
    code, _, err = cli("export", tmp_path / "qwen", "--to", "gguf", "--out", tmp_path / "out.gguf")
    assert code == 2
    assert "this 'qwen3' model cannot be exported to GGUF" in err
    assert not (tmp_path / "out.gguf").exists()


def test_export_does_not_overwrite(cli, run):
    assert cli("export", run, "--to", "hf")[0] == 0
    code, _, err = cli("export", run, "--to", "hf")
    assert code == 2
    assert "never overwrites existing files" in err


@pytest.mark.skipif("mlx" in LAYOUTS, reason="the layout is known")
def test_export_rejects_unsupported_layout(cli, run):
    code, _, err = cli("export", run, "--to", "mlx")
    assert code == 2
    assert "unknown adapter layout 'mlx'" in err


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx_lm is installed")
def test_mlx_check_without_mlx_is_reported_as_skipped(run, tmp_path, cli, monkeypatch):
    [result] = check_export(
        load_for_export(run), tmp_path, "mlx", dtype=torch.float32, kind="", tolerance=None
    )
    assert (result.passed, result.is_required) == (None, True)
    assert result.text == "mlx_lm is not installed"
    monkeypatch.setattr("whet.model_io.export.export_model.save_adapter", lambda *_, **__: None)
    code, out, _ = cli("export", run, "--to", "mlx", "--check")
    assert code == 4
    assert "not checked: mlx_lm is not installed" in out


def spoil(path, change):
    tensors = load_file(path)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", ["hf", "peft"])
def test_check_detects_wrong_weights(run, tmp_path, layout):
    loaded = load_for_export(run)
    settings = {"dtype": torch.float32, "kind": "f16", "tolerance": None}
    write_export(loaded, tmp_path / "out", layout, **settings)
    assert check_export(loaded, tmp_path / "out", layout, **settings)[0].passed
    [file] = (tmp_path / "out").glob("*.safetensors")
    spoil(file, lambda tensor: tensor * 1.1)
    [result] = check_export(loaded, tmp_path / "out", layout, **settings)
    assert result.passed is False
    assert "(tolerance " in result.text
    file.write_bytes(b"not weights")
    [result] = check_export(loaded, tmp_path / "out", layout, **settings)
    assert result.passed is False
    assert "it cannot be loaded" in result.text


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_check_detects_gguf_of_another_model(run, tiny_directory, tmp_path, kind):
    settings = {"dtype": torch.float32, "kind": kind, "tolerance": None}
    write_export(load_for_export(tiny_directory), tmp_path / "base.gguf", "gguf", **settings)
    loaded = load_for_export(run)
    write_export(loaded, tmp_path / "out.gguf", "gguf", **settings)
    assert all(
        result.passed is not False
        for result in check_export(loaded, tmp_path / "out.gguf", "gguf", **settings)
    )
    tensors, *_ = check_export(loaded, tmp_path / "base.gguf", "gguf", **settings)
    assert tensors.passed is False
    assert "more than the quantization step of its type" in tensors.text


def test_gguf_check_compares_tokens_and_template(run, tmp_path):
    settings = {"dtype": torch.float32, "kind": "f16", "tolerance": None}
    loaded = load_for_export(run)
    write_export(loaded, tmp_path / "out.gguf", "gguf", **settings)
    loaded.tokenizer.chat_template = "{{ messages }}"
    results = check_export(loaded, tmp_path / "out.gguf", "gguf", **settings)
    assert [one.text for one in results if one.passed is False] == ["tokens equal, chat template differs"]


def test_adapter_on_adapter_cannot_be_checked_with_peft(run, tmp_path):
    model, tokenizer = load_base(run, dtype=torch.float32, device="cpu")
    model.name = str(run)
    whet.save_adapter(whet.attach_lora(model), tmp_path / "second", tokenizer=tokenizer)
    loaded = load_for_export(tmp_path / "second")
    settings = {"dtype": torch.float32, "kind": "", "tolerance": None}
    write_export(loaded, tmp_path / "out", "peft", **settings)
    [result] = check_export(loaded, tmp_path / "out", "peft", **settings)
    assert result.passed is None
    assert "its base is an adapter or a checkpoint" in result.text


def test_generation_config_end_tokens_are_exported(cli, tmp_path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    code, out, err = cli("export", tmp_path / "model", "--to", "gguf", "--out", tmp_path / "out.gguf")
    assert code == 0, out + err
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"].contents() == 258


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_export_checkpoint_of_model_from_scratch(cli, tiny_directory, tmp_path, layout):
    preset = {"preset": "nano", "tokenizer": str(tiny_directory), "d_model": 64, "layers": 2, "heads": 2}
    config = run_config(tiny_directory, tmp_path, method={"kind": "full"}, run={"steps": 1})
    run = whet.train(config | {"model": preset}).directory
    out = tmp_path / ("model.gguf" if layout == "gguf" else "model")
    checkpoint = run / "checkpoints" / "step-000001"
    kind = ("--type", "f32") if layout == "gguf" else ()
    code, printed, err = cli("export", checkpoint, "--to", layout, *kind, "--out", out)
    assert code == 0, printed + err
    ours, theirs = (whet.load(path, dtype=torch.float32, device="cpu")[0] for path in (checkpoint, out))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(torch.arange(8)[None]), theirs(torch.arange(8)[None]), rtol=0, atol=1e-3
        )
