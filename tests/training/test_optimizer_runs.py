"""Runs with each optimizer: they train, survive a non-finite step, and resume to the same weights."""

import math

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, StopRun

# a good rate for each on the tiny model
RATES = {
    "adamw": 1e-2,
    "adam": 1e-2,
    "sgd": 0.3,
    "lion": 5e-3,
    "adafactor": 5e-2,
    "muon": 1e-2,
    "adamw8bit": 1e-2,
}


def config(tiny_directory, tmp_path, name, **run):
    return run_config(
        tiny_directory,
        tmp_path,
        method={"kind": "full"},
        optim={
            "name": name,
            "lr": RATES[name],
            "weight_decay": 0.01,
            "schedule": [{"kind": "constant", "steps": 6}, {"kind": "wsd"}],
            "groups": {"embed": {"lr_scale": 0.5}, "norm": {"weight_decay": 0.0}},
        },
        run={"steps": 14, "on_nonfinite": "skip", **run},
    )


@pytest.mark.parametrize("name", RATES)
def test_each_optimizer_trains_and_survives_a_nonfinite_step(tiny_directory, tmp_path, monkeypatch, name):
    original, calls = SFT.loss, []

    def loss(self, model, batch):
        result = original(self, model, batch)
        calls.append(model.training)
        poisoned = model.training and sum(calls) == 3
        return type(result)({"loss": result.sums["loss"] * (math.nan if poisoned else 1)})

    monkeypatch.setattr(SFT, "loss", loss)
    result = whet.train(config(tiny_directory, tmp_path, name))
    rows = [row for row in result.history if "loss" in row]
    assert sum(row.get("skipped", False) for row in rows) == 1
    first, *_, last = (row["eval_loss"] for row in result.history if "eval_loss" in row)
    assert last < first - 1.5
    assert "pattern 'embed': 1 tensor (8.3k), lr x 0.5" in (result.directory / "log.txt").read_text()


class StopAt3(Callback):
    def on_step_end(self, step, metrics):
        return StopRun("test", unfinished=True) if step == 3 else None


@pytest.mark.parametrize("name", RATES)
def test_resumed_run_equals_an_uninterrupted_one(tiny_directory, tmp_path, name):
    whole = whet.train(config(tiny_directory, tmp_path / "whole", name, steps=9))
    part = whet.train(config(tiny_directory, tmp_path / "part", name, steps=9), [StopAt3()])
    done = whet.resume(part.directory)
    a, b = (load_file(run.directory / "final" / "model.safetensors") for run in (whole, done))
    assert all(torch.equal(a[key], b[key]) for key in a)
