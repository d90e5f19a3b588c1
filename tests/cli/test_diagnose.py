"""whet diagnose: text and JSON output, and exit codes."""

import json

import pytest
import torch
import yaml

from tiny import run_config
from whet.studies import diagnose


@pytest.fixture
def quality(tmp_path):
    path = tmp_path / "quality.yaml"
    path.write_text(
        yaml.safe_dump({"model": {"quality": "nano"}, "run": {"batch_size": 16, "device": "cpu"}})
    )
    return path


def test_healthy_model_is_fine_with_strict(cli, quality):
    code, out, err = cli("diagnose", quality, "--strict")
    assert code == 0, err
    assert "verdict: fine" in out
    assert "experts by row:" in out
    assert "divergent rows 0/16" in out
    code, out, err = cli("diagnose", quality, "--json")
    diagnosis = json.loads(out)
    assert (diagnosis["verdict"], diagnosis["reference"], diagnosis["batch"]) == ("fine", "fp64", 16)
    assert [path["name"] for path in diagnosis["paths"]] == ["fp32", "bf16", "fp16", "sim-bf16", "sim-fp16"]
    assert len(diagnosis["paths"][0]["parameters"]) == 58
    assert set(diagnosis["paths"][0]["parameters"][0]) == {
        "name", "verdict", "norm", "reference_norm", "ratio", "abs_diff", "rel_diff", "cosine",
    }  # fmt: skip
    assert len(diagnosis["routing"]) == 16


def change_model(monkeypatch, change):
    """Let a command look at another model than the one it built."""
    original = diagnose.diagnose_batch

    def examine(model, objective, batch):
        with torch.no_grad():
            change(model)
        return original(model, objective, batch)

    monkeypatch.setattr(diagnose, "diagnose_batch", examine)


def test_overflow_is_major_and_strict_exits_4(cli, quality, monkeypatch):
    change_model(monkeypatch, lambda model: model.experts[1][0].weight.mul_(1e6))
    code, out, _ = cli("diagnose", quality)
    assert code == 0
    assert "verdict: major" in out
    assert "experts.1.3.weight" in out.split("sim-fp16: major")[1]
    code, _, _ = cli("diagnose", quality, "--strict")
    assert code == 4
    code, out, _ = cli("diagnose", quality, "--json")
    assert json.loads(out)["paths"][-1]["worst_ratio"] == "inf"


def test_divergent_routing_is_marked(cli, quality, monkeypatch):
    def tie(model):
        noise = torch.randn(96, generator=torch.Generator().manual_seed(0))
        model.router.bias.copy_(torch.tensor([-5.0, 0.0, 0.0, 5.0]))
        model.router.weight[2] = model.router.weight[1] + 1e-4 * noise

    change_model(monkeypatch, tie)
    _, out, _ = cli("diagnose", quality, "run.batch_size=128")
    assert "[ROUTING DIVERGENT]" in out
    assert "... and 108 more" in out


@pytest.mark.parametrize("objective", [{"kind": "sft"}, {"kind": "orpo"}])
def test_diagnose_language_models_and_other_objectives(cli, objective, tiny_directory, tmp_path):
    data = {"train": "synth:house-pairs:8", "valid": None} if objective["kind"] == "orpo" else {}
    config = run_config(tiny_directory, tmp_path, objective=objective, data=data)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, out, err = cli("diagnose", tmp_path / "run.yaml", "--json")
    assert code == 0, err
    diagnosis = json.loads(out)
    assert diagnosis["reference"] == "fp64"
    assert diagnosis["routing"] == []
    assert any("lora_A" in row["name"] for row in diagnosis["paths"][0]["parameters"])
    assert diagnosis["paths"][0]["verdict"] == "fine"
    assert not (tmp_path / "runs").exists()  # it writes nothing


def test_diagnose_rejects_qlora(cli, tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, method={"kind": "qlora"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, _, err = cli("diagnose", tmp_path / "run.yaml")
    assert (code, "set method.kind to lora" in err) == (2, True)
