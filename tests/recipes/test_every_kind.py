"""Every objective kind of the registry, through the same checks: train, resume, split, two processes, plan, final.

A kind that is added to the registry without a row here fails `test_every_kind_has_a_row`.
"""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.golden import config_of, stop_half_way, write_inputs

import whet
from distributed.harness import run_world
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.recipes.registry import RECIPES

# the configuration of each kind in tools/golden.py
ROWS = {
    "sft": "sft-lora",
    "dpo": "dpo",
    "ipo": "ipo",
    "orpo": "orpo",
    "simpo": "simpo",
    "distill": "distill",
    "mtp": "mtp",
    "distrust": "distrust",
    "mix": "mix",
    "classify": "classify",
    "grpo": "grpo",
    "regression": "quality-sgd",
}
STEPS = 4
TABULAR = {"regression"}  # rows of features instead of token sequences
# kinds whose final/ is not a language model: a metric of the run, and its name in whet.evaluate
EVALUATED = {"classify": ("mcc", "mcc"), "regression": ("eval_loss", "eval_loss")}
# metrics that measure time or memory
UNCOMPARED = ("_s", "_ms", "peak_gib")

every_kind = pytest.mark.parametrize("kind", ROWS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with the models and records that the configurations name."""
    directory = tmp_path_factory.mktemp("kinds")
    write_inputs(directory)
    return directory


@pytest.fixture
def config(kind, inputs, tmp_path, monkeypatch):
    """Return a function that makes the kind's configuration for a run directory under tmp_path."""
    monkeypatch.chdir(inputs)
    return lambda name="run", **sections: configure(kind, tmp_path, name, **sections)


def configure(kind, directory, name="run", **sections):
    config = config_of(ROWS[kind])
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    config["run"] |= {"name": name, "dir": str(directory)}
    return config


def rows(directory):
    """Return the entries of metrics.jsonl without timings, and without the summary at its end."""
    *entries, last = [
        json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()
    ]
    assert last["summary"]["steps"] == STEPS
    return [
        {name: value for name, value in entry.items() if not name.endswith(UNCOMPARED)} for entry in entries
    ]


def losses(directory):
    return [row["loss"] for row in rows(directory) if "loss" in row]


def hashes(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(directory).rglob("*.safetensors")
    }


def final_tensors(directory):
    return {
        f"{path.name}:{name}": tensor
        for path in (Path(directory) / "final").rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def relative_distance(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert expected
    squares = sum((tensors[name].double() - expected[name].double()).square().sum() for name in expected)
    return float((squares / sum(tensor.double().square().sum() for tensor in expected.values())).sqrt())


def test_every_kind_has_a_row():
    assert ROWS.keys() == RECIPES.keys()


@every_kind
def test_train(config):
    result = whet.train(config(), verbose=0)
    assert result.steps == STEPS
    assert len(losses(result.directory)) == STEPS
    assert all(map(math.isfinite, losses(result.directory)))


@every_kind
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(config):
    uninterrupted = whet.train(config("uninterrupted"), verbose=0).directory
    stop_half_way(config("resumed"))
    resumed = Path(config("resumed")["run"]["dir"]) / "resumed"
    assert not (resumed / "final").exists()
    whet.resume(resumed, verbose=0)
    assert rows(resumed) == rows(uninterrupted)
    assert hashes(resumed / "final") == hashes(uninterrupted / "final")


@every_kind
def test_the_size_of_micro_batches_does_not_change_the_run(kind, config):
    if kind in TABULAR:
        pytest.skip("a step of rows is one micro-batch")
    split, joined = (
        whet.train(config(f"{size}-tokens", run={"micro_batch_tokens": size}), verbose=0).directory
        for size in (300, 4096)
    )
    assert relative_distance(final_tensors(split), final_tensors(joined)) < 1e-5
    assert losses(split) == pytest.approx(losses(joined), rel=1e-4, abs=1e-6)


class TrainedModel(whet.ModelCallback):
    """Keeps the logits and the number of trained parameters that a run ends with."""

    def on_train_end(self, result):
        self.trained_parameters = sum(parameter.numel() for parameter in self.trainer.trained)
        self.logits = None
        if isinstance(self.trainer.model, LanguageModel):
            self.logits = logits_of(self.trainer.model)


@torch.no_grad()
def logits_of(model):
    model.eval()
    return model(torch.arange(1, 13).reshape(2, 6)).float()


@every_kind
def test_the_plan_counts_the_parameters_that_the_run_trains(kind, config):
    if kind in TABULAR:
        with pytest.raises(ConfigError, match="needs a language model"):
            whet.plan(config())
        return
    plan = whet.plan(config())
    trained = TrainedModel()
    whet.train(config(), [trained], verbose=0)
    assert plan.trained == trained.trained_parameters
    assert plan.flops.computed > 0
    assert plan.memory.peak > 0


@every_kind
def test_final_is_the_model_that_was_trained(kind, config):
    trained = TrainedModel()
    directory = whet.train(config(), [trained], verbose=0).directory
    if kind in EVALUATED:
        metrics = whet.evaluate(directory, config()["data"]["valid"])
        last = [row for row in rows(directory) if EVALUATED[kind][0] in row][-1]
        name, reported = EVALUATED[kind]
        assert metrics[reported] == pytest.approx(last[name], rel=1e-6)
    else:
        model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
        torch.testing.assert_close(logits_of(model), trained.logits, rtol=1e-5, atol=1e-5)


@every_kind
def test_two_processes_train_the_run_of_one(kind, config, tmp_path):
    if kind in TABULAR:
        pytest.skip("a quality model trains in one process")
    alone = whet.train(config("alone"), verbose=0).directory
    both = {"both": config("both", parallel={"kind": "ddp"})}
    run_world(2, "train_and_record", out=tmp_path / "out", timeout=300, configs=both)
    assert relative_distance(final_tensors(tmp_path / "both"), final_tensors(alone)) < 1e-5
