"""Adapters refer to their base so that other programs find it, and whet finds the same local copy."""

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from typer.testing import CliRunner

import whet
from tiny import run_config
from whet.cli.app import app
from whet.model_io.base_models import base_model_of
from whet.model_io.resolve_model import hub_id

ALIAS, HUB_ID = "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
TOKENS = torch.tensor([[5, 17, 99, 3, 250, 41]])


@pytest.fixture
def caches(tiny_directory, tmp_path, monkeypatch):
    """whet's cache with a model under its alias, and the hub cache with the same model under its id."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "whet"))
    shutil.copytree(tiny_directory, tmp_path / "whet" / "models" / ALIAS)
    repository = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    shutil.copytree(tiny_directory, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return tmp_path


def config_of(directory):
    return json.loads((directory / "adapter_config.json").read_text())


@torch.no_grad()
def logits_of(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    return model(TOKENS)


def test_final_of_a_model_by_alias_loads_in_autopeft(caches):
    run = whet.train(run_config(ALIAS, caches, run={"steps": 1})).directory
    final = run / "final"
    assert config_of(final)["base_model_name_or_path"] == HUB_ID
    local = {"name": ALIAS, "directory": str(caches / "whet" / "models" / ALIAS)}
    assert json.loads((final / "trained_on.json").read_text()) == local
    theirs = AutoPeftModelForCausalLM.from_pretrained(final, cache_dir=caches / "hub", dtype=torch.float32)
    ours = logits_of(run)
    assert (theirs.eval()(input_ids=TOKENS).logits.detach() - ours).abs().max() < 1e-4

    for layout, key in (("peft", "base_model_name_or_path"), ("mlx", "model")):
        out = caches / layout
        result = CliRunner().invoke(app, ["export", str(run), "--to", layout, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert config_of(out)[key] == HUB_ID
        assert json.loads((out / "trained_on.json").read_text())["directory"] == local["directory"]
        assert torch.equal(logits_of(out), ours)


def test_runs_of_older_versions_with_an_alias_still_load(caches):
    final = whet.train(run_config(ALIAS, caches, run={"steps": 1})).directory / "final"
    ours = logits_of(final)
    (final / "adapter_config.json").write_text(
        json.dumps({**config_of(final), "base_model_name_or_path": ALIAS})
    )
    (final / "trained_on.json").unlink()
    assert base_model_of(final) == ALIAS
    assert torch.equal(logits_of(final), ours)


def test_classifier_by_alias_loads_in_autopeft(caches):
    data = caches / "labels.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {n}", "label": n % 2}) + "\n" for n in range(8)))
    config = run_config(
        ALIAS,
        caches,
        objective={"kind": "classify", "classes": ["no", "yes"]},
        data={"train": str(data), "valid": str(data)},
        run={"steps": 1},
    )
    final = whet.train(config).directory / "final"
    assert config_of(final)["base_model_name_or_path"] == HUB_ID
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(
        final, cache_dir=caches / "hub", dtype=torch.float32, num_labels=2
    )
    assert theirs.eval()(input_ids=TOKENS).logits.shape == (1, 2)


def test_name_without_a_hub_id_becomes_a_path(caches):
    shutil.copytree(caches / "whet" / "models" / ALIAS, caches / "whet" / "models" / "mine")
    model, _ = whet.load("mine", dtype=torch.float32, device="cpu")
    whet.save_adapter(whet.attach_lora(model), caches / "adapter")
    assert config_of(caches / "adapter")["base_model_name_or_path"] == str(
        caches / "whet" / "models" / "mine"
    )
    assert not (caches / "adapter" / "trained_on.json").exists()


def test_hub_id():
    assert hub_id("smollm2-135m-instruct") == hub_id("huggingfacetb/smollm2-135m-instruct") == HUB_ID
    assert hub_id("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hub_id("mine") is hub_id("../x/y") is hub_id("/a/b") is None
