"""whet export --quantize: measured before the export appears, refused above a bound, refused where it is wrong."""

import json
import re
import shutil

import pytest
import torch

import whet
from tiny import run_config, write_tiny_model
from whet.errors import CheckError, ConfigError, ModelError

pytest.importorskip("compressed_tensors")
pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quantized") / "base"
    write_tiny_model(directory, hidden_size=64, intermediate_size=128)
    return directory


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    config = run_config(base, tmp_path_factory.mktemp("quantized"), optim={"lr": 3e-2})
    return whet.train(config).directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def exports(run):
    return sorted(path.name for path in (run / "export").iterdir()) if (run / "export").exists() else []


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("fp8", "fp8, scales per channel"),
        ("int8", "int8, scales per channel"),
        ("int4", "int4, group size 64"),
        ("nf4", "nf4"),
    ],
)
def test_run_is_measured_on_its_validation_data(cli, run, kind, label):
    code, out, err = cli("export", run, "--to", "hf", "--quantize", kind, "--check")
    assert code == 0, out + err
    assert f"on the validation data of {run}" in out
    assert "merged into" in out
    assert re.search(rf"^{label} +[\d.]+ MB +[\d.]+ +[\d.e-]+$", out, flags=re.M)
    assert "checked: transformers: largest logit difference" in out
    assert exports(run) == [f"hf-{kind}"]
    perplexity, quantized = (
        whet.evaluate(each, "synth:house-valid:6", max_length=256)["eval_perplexity"]
        for each in (run, run / "export" / f"hf-{kind}")
    )
    rows = re.findall(r"MB +([\d.]+) ", out)
    assert float(rows[0]) == pytest.approx(perplexity, rel=2e-3)
    if kind != "fp8":  # whose activations are only quantized for the measurement
        assert float(rows[1]) == pytest.approx(quantized, rel=2e-3)


def test_table_has_exact_match_and_the_data(cli, run, tmp_path):
    records = [{"prompt": "Dim the lamp", "completion": "ok"}] * 3
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, err = cli(
        *("export", run, "--to", "hf", "--quantise", "int8", "--data", tmp_path / "test.jsonl", "--generate")
    )
    assert code == 0, out + err
    assert f"on {tmp_path / 'test.jsonl'}" in out
    assert "exact match" in out
    assert re.search(r"^int8.* 0\.0%$", out, flags=re.M)


def test_broken_bound_refuses_the_export(cli, run):
    code, out, err = cli("export", run, "--to", "hf", "--quantize", "int4", "--max-kl", "1e-9")
    assert code == 4, out + err
    assert "above the bound of 1e-09. Nothing was written" in err
    assert re.search(r"^int4, group size 64 +[\d.]+ MB", err, flags=re.M)
    assert exports(run) == []


def test_satisfied_bound_exports(cli, run):
    code, out, err = cli(
        *("export", run, "--to", "hf", "--quantize", "int8", "--max-kl", "10"),
        *("--max-perplexity-increase", "10"),
    )
    assert code == 0, out + err
    assert exports(run) == ["hf-int8"]


def test_model_without_data_is_measured_on_the_bundled_text(cli, base, tmp_path):
    code, out, err = cli(
        "export", base, "--to", "hf", "--quantize", "int8", "--check", "--out", tmp_path / "out"
    )
    assert code == 0, out + err
    assert "on the bundled text" in out


def test_python_raises_the_broken_bound(run):
    with pytest.raises(CheckError, match="KL divergence is .* above the bound of 1e-09"):
        whet.export(run, to="hf", quantize="int8", check=True, max_kl=1e-9)
    assert exports(run) == []
    path = whet.export(run, to="hf", quantize="int8", check=True, max_kl=10.0, scales=None)
    model, _ = whet.load(path)
    assert isinstance(model, torch.nn.Module)


def test_damaged_export_does_not_appear(cli, run, monkeypatch):
    """A difference between whet's and transformers' reading refuses the export."""
    from whet.model_io.export import quantized_check

    load = quantized_check.load_dequantized

    def damaged(directory):
        model = load(directory)
        with torch.no_grad():
            model.model.norm.weight[0] += 1
        return model

    monkeypatch.setattr(quantized_check, "load_dequantized", damaged)
    code, out, err = cli("export", run, "--to", "hf", "--quantize", "nf4", "--check")
    assert code == 4, out + err
    assert "CHECK FAILED: transformers: largest logit difference" in err
    assert exports(run) == []


def test_quantized_model_is_not_quantized_again_but_dequantized(cli, base, tmp_path):
    quantized = whet.export(base, quantize="int8", output=tmp_path / "int8")
    code, out, err = cli("export", quantized, "--to", "hf", "--quantize", "int4", "--out", tmp_path / "int4")
    assert code == 2
    assert "is already quantized" in err
    assert not (tmp_path / "int4").exists()
    code, out, err = cli("export", quantized, "--to", "hf", "--out", tmp_path / "float", "--check")
    assert code == 0, out + err
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())


def test_adapter_of_a_quantized_base_can_be_trained_and_quantized(base, tmp_path):
    quantized = whet.export(base, quantize="nf4", output=tmp_path / "nf4")
    directory = whet.train(run_config(quantized, tmp_path, optim={"lr": 3e-2})).directory
    path = whet.export(directory, quantize="nf4", check=True)
    assert json.loads((path / "config.json").read_text())["quantization_config"]["load_in_4bit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "peft", "--quantize", "int8"), "--quantize only applies to --to hf"),
        (("--to", "gguf", "--quantize", "int8"), "quantized by --type"),
        (("--to", "hf", "--quantize", "int8", "--type", "q8_0"), "--type only applies to --to gguf"),
        (("--to", "hf", "--quantize", "int3"), "int3"),
        (
            ("--to", "hf", "--quantize", "int8", "--scales", "tensor"),
            "--scales only applies to --quantize fp8",
        ),
        (("--to", "hf", "--max-kl", "0"), "--max-kl needs --quantize"),
        (("--to", "hf", "--quantize", "int8", "--max-kl", "-1"), "max_kl must be at least 0"),
        (("--to", "hf", "--quantize", "int8", "--data", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_invalid_options_are_refused(cli, run, arguments, message):
    code, out, err = cli("export", run, *arguments)
    assert code == 2, out + err
    assert message in err
    assert exports(run) == []


def test_classifier_is_refused(base, tmp_path):
    config = run_config(base, tmp_path, objective={"kind": "classify", "classes": ["a", "b"]})
    rows = [{"input": f"text {n}", "label": "ab"[n % 2]} for n in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] = {"train": str(tmp_path / "train.jsonl"), "max_length": 64}
    directory = whet.train(config).directory
    with pytest.raises(ModelError, match="is a classifier, which cannot be quantized"):
        whet.export(directory, quantize="int8")


def test_preference_data_needs_other_records(run, tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (run / "config.yaml").read_text().replace("synth:house-valid:6", str(tmp_path / "pairs.jsonl"))
    (run / "config.yaml").write_text(config)
    with pytest.raises(Exception, match="choose other records with --data FILE"):
        whet.export(run, quantize="int8", check=True)


def test_missing_library_is_named(run, monkeypatch):
    from whet.model_io.export import quantized_check

    monkeypatch.setattr(quantized_check, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs compressed-tensors\n.*whet\[compressed\]"):
        whet.export(run, quantize="int8", check=True)
    assert whet.export(run, quantize="int8").is_dir()  # writing does not need it
