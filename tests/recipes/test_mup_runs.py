"""Runs with muP: identical at the base width, resumable, and rejected where there is no rule."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.config.load_config import load_config, validate_config
from whet.errors import ConfigError
from whet.training.callbacks import Callback, StopRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "mup-nano.yaml"
RATES = {"adamw": 1e-2, "sgd": 0.3, "muon": 1e-2}


def mup_config(tmp_path, *, name="adamw", base=16, **sections):
    path = tmp_path / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [{"text": f"Line {n}: the cat number {n % 7} sits on mat {n % 5}."} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)))
    config = {
        "model": {"preset": "nano", "d_model": 32, "layers": 2, "heads": 4, "width": 48},
        "method": {"kind": "full"},
        "data": {"train": str(path), "max_length": 128},
        "optim": {
            "name": name,
            "lr": RATES[name],
            "weight_decay": 0.1,
            "mup": None if base is None else {"base_width": base},
        },
        "run": {
            **{"dir": str(tmp_path / "runs"), "name": name, "steps": 6, "batch_size": 8},
            **{"device": "cpu", "precision": "fp32"},
        },
    }
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return config


def weights(result):
    return load_file(result.directory / "final" / "model.safetensors")


@pytest.mark.parametrize("name", RATES)
def test_run_at_base_width_is_bit_identical_to_a_run_without_mup(tmp_path, name):
    usual = weights(whet.train(mup_config(tmp_path / "usual", name=name, base=None)))
    same = weights(whet.train(mup_config(tmp_path / "same", name=name, base=32)))
    other = weights(whet.train(mup_config(tmp_path / "other", name=name, base=16)))
    assert all(torch.equal(usual[key], same[key]) for key in usual)
    assert not all(torch.equal(usual[key], other[key]) for key in usual)


class StopAt3(Callback):
    def on_step_end(self, step, metrics):
        return StopRun("test", unfinished=True) if step == 3 else None


@pytest.mark.parametrize("name", RATES)
def test_resumed_run_equals_uninterrupted_run_and_its_checkpoint_loads(tmp_path, name):
    uninterrupted = whet.train(mup_config(tmp_path / "whole", name=name))
    part = whet.train(mup_config(tmp_path / "part", name=name), [StopAt3()])
    checkpoint, _ = whet.load(part.directory / "checkpoints" / "step-000003", device="cpu")
    assert checkpoint.spec.logit_scale == 0.5
    done = whet.resume(part.directory)
    a, b = weights(uninterrupted), weights(done)
    assert all(torch.equal(a[key], b[key]) for key in a)
    losses = [row["loss"] for row in uninterrupted.history if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert "muP lr x" in (uninterrupted.directory / "log.txt").read_text()


@pytest.mark.slow
def test_compiled_layers_train_like_eager_ones(tmp_path):
    plain, compiled = (
        weights(whet.train(mup_config(tmp_path / str(on), run={"compile": on, "steps": 3})))
        for on in (False, True)
    )
    for key in plain:
        torch.testing.assert_close(plain[key], compiled[key], rtol=1e-3, atol=1e-4)


def test_mup_model_is_only_fine_tuned_with_its_own_mup_settings(tmp_path):
    first = whet.train(mup_config(tmp_path))
    final = str(first.directory / "final")
    assert json.loads((Path(final) / "config.json").read_text())["model_type"] == "granite"
    again = whet.train(mup_config(tmp_path, model=final, run={"name": "again", "steps": 2}))
    assert again.history[0]["loss"] < first.history[0]["loss"] - 0.5
    assert "muP lr x 0.5" in (again.directory / "log.txt").read_text()
    with pytest.raises(ConfigError, match="was not built with muP at optim.mup.base_width=8"):
        whet.train(mup_config(tmp_path, model=final, base=8, run={"name": "other"}))
    assert not (tmp_path / "runs" / "other").exists()


def test_model_without_mup_is_rejected(tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, method={"kind": "full"}, optim={"mup": {"base_width": 16}})
    with pytest.raises(ConfigError, match="was not built with muP"):
        whet.train(config)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": "m", "method": {"kind": "lora"}}, "optim.mup scales all weights, so it needs method.kind: full"),
        ({"objective": {"kind": "mtp"}}, "optim.mup has no scaling rule for the heads of objective.kind mtp"),
        ({"objective": {"kind": "classify", "classes": ["a", "b"]}}, "optim.mup has no scaling rule for the heads of objective.kind classify"),
        ({"optim": {"name": "adafactor", "weight_decay": 0}}, "mup has no scaling rule for adafactor"),
        ({"optim": {"name": "adam"}}, "mup has no scaling rule for Adam's weight decay, which is part of the gradient: use adamw"),
        ({"optim": {"mup": {"base_width": 0}}}, "optim.mup.base_width: Input should be greater than 0"),
        ({"optim": {"mup": {}}}, "optim.mup.base_width is missing"),
        ({"optim": {"mup": {"base_with": 3, "base_width": 4}}}, "did you mean 'base_width'?"),
    ],
)  # fmt: skip
def test_settings_without_a_mup_rule_are_rejected(tmp_path, sections, message):
    with pytest.raises(ConfigError) as caught:
        validate_config(mup_config(tmp_path, **sections))
    assert message in str(caught.value)


def test_tabular_models_do_not_support_mup():
    with pytest.raises(ConfigError, match="optim.mup needs a language model"):
        validate_config({"model": {"quality": "nano"}, "optim": {"mup": {"base_width": 4}}})


@pytest.mark.parametrize(
    ("model", "base", "message"),
    [
        ({}, 6, r"optim.mup.base_width=6 is not a multiple of the number of heads \(4\)"),
        ({"attention": "latent"}, 16, "optim.mup does not support latent attention"),
    ],
)
def test_shapes_without_a_base_are_rejected_before_anything_is_written(tmp_path, model, base, message):
    with pytest.raises(ConfigError, match=message):
        whet.train(mup_config(tmp_path, base=base, model=model))
    assert not (tmp_path / "runs").exists()


def test_example_runs_with_a_base_below_its_width(tmp_path):
    overrides = [f"run.dir={tmp_path}", "run.steps=2", "run.device=cpu", "run.precision=fp32"]
    config = load_config(EXAMPLE, overrides)
    assert config.optim.mup.base_width < config.model.d_model
    result = whet.train(config)
    assert result.steps == 2
    model, _ = whet.load(result.directory, device="cpu")
    assert model.spec.logit_scale == 0.5
