"""Runs with objects from Python: equal to runs from files, exact resume, and errors."""

import json
import subprocess
import sys

import datasets
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

import whet
from tiny import run_commands, run_config
from whet.errors import CheckpointError, ConfigError, DataError
from whet.given.given import collect_given
from whet.runs.run import resume, train
from whet.training.callbacks import Callback, StopRun

ROWS = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}", "group": f"g{n % 2}"} for n in range(12)]
TIMES = ("_s", "per_s", "seconds", "peak_gib", "directory", "flops")


def rows_of(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in rows]


def weights_of(directory):
    return load_file(directory / "final" / "adapter_model.safetensors")


def same_weights(one, other):
    one, other = weights_of(one), weights_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == self.step else None


def config_without_data(tiny_directory, tmp_path, **sections):
    config = run_config(tiny_directory, tmp_path, **sections)
    for split in ("train", "valid"):
        del config["data"][split]
    return config


@pytest.mark.parametrize("kind", ["list", "function", "Dataset", "DataFrame"])
def test_metrics_match_the_same_records_in_files(tiny_directory, tmp_path, kind):
    for name, rows in (("train", ROWS), ("valid", ROWS[:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": f"{tmp_path}/train.jsonl", "valid": f"{tmp_path}/valid.jsonl"}
    sections = {"eval": {"every": 2, "generate": True, "max_new_tokens": 4}, "run": {"steps": 5}}
    expected = whet.train(run_config(tiny_directory, tmp_path / "files", data=files, **sections))
    make = {
        "list": list,
        "function": lambda rows: lambda: iter(rows),
        "Dataset": datasets.Dataset.from_list,
        "DataFrame": pd.DataFrame,
    }[kind]
    given = collect_given({"train": make(ROWS), "valid": make(ROWS[:5])})
    config = config_without_data(tiny_directory, tmp_path / "objects", **sections)
    result = train(config, given=given)
    for mine, reference in zip(rows_of(result.directory), rows_of(expected.directory), strict=True):
        if "summary" not in mine:
            assert mine == reference
    assert same_weights(result.directory, expected.directory)
    written = yaml.safe_load((result.directory / "config.yaml").read_text())["data"]
    assert written["train"] == f"python:train:{given.data['train'].digest()[:16]}"
    provenance = json.loads((result.directory / "provenance.json").read_text())
    assert provenance["data_sha256"]["train"] == given.data["train"].digest()
    reference = json.loads((expected.directory / "provenance.json").read_text())
    assert provenance["tokens_sha256"] == reference["tokens_sha256"]


def test_custom_metrics_are_in_every_evaluation_and_the_test_summary(tiny_directory, tmp_path):
    seen = []

    def mean_length(answers, records):
        seen.append(records)
        return sum(map(len, answers)) / len(answers)

    sections = {
        "eval": {"every": 2, "max_new_tokens": 4, "early_stop": {"metric": "eval_length", "patience": 9}}
    }
    config = config_without_data(tiny_directory, tmp_path, **sections)
    data = {"train": ROWS, "valid": ROWS[:5], "test": ROWS[5:]}
    result = train(config, given=collect_given(data, metrics={"length": mean_length}))
    evaluated = [row for row in rows_of(result.directory) if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    assert all(row["eval_length"] > 0 and "exact_match" not in row for row in evaluated)
    assert result.summary["test"]["length"] > 0
    assert result.summary["best"]["metric"] == "eval_length"
    assert seen == [ROWS[:5]] * 3 + [ROWS[5:]]


def test_custom_metrics_are_loaded_from_files_named_in_yaml(tiny_directory, tmp_path):
    (tmp_path / "yaml_metrics.py").write_text("def count(answers):\n    return len(answers)\n")
    sections = {"eval": {"metrics": {"count": f"{tmp_path}/yaml_metrics.py:count"}, "max_new_tokens": 2}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert [row["eval_count"] for row in rows_of(result.directory) if "eval_loss" in row] == [6, 6]
    sections["eval"]["metrics"] = {"count": f"{tmp_path}/yaml_metrics.py:other"}
    with pytest.raises(ConfigError, match="eval.metrics.count: .* has no function 'other'"):
        whet.train(run_config(tiny_directory, tmp_path / "other", **sections))
    assert not (tmp_path / "other").exists()
    sys.modules.pop("yaml_metrics")


def grpo_config(tiny_directory, tmp_path):
    objective = {"kind": "grpo", "group_size": 3, "max_new_tokens": 6, "reward_workers": 1}
    sections = {"objective": objective, "run": {"batch_size": 2}, "eval": {"every": 2}}
    return config_without_data(tiny_directory, tmp_path, **sections)


def grpo_objects(**changes):
    target = 2

    def near(completion, record):
        assert "completion" in record
        return -abs(len(completion) - target)

    return collect_given(
        **{
            "data": {"train": ROWS, "valid": ROWS[:4]},
            "rewards": {"near": near},
            "metrics": {"empty": lambda answers: sum(not answer for answer in answers)},
            **changes,
        }
    )


def test_grpo_run_with_a_closure_resumes_exactly_and_only_with_the_same_objects(tiny_directory, tmp_path):
    uninterrupted = train(grpo_config(tiny_directory, tmp_path / "whole"), given=grpo_objects())
    evaluated = [row for row in rows_of(uninterrupted.directory) if "eval_reward" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    assert all({"eval_reward_near", "eval_empty", "exact_match"} <= row.keys() for row in evaluated)
    first = train(grpo_config(tiny_directory, tmp_path / "parts"), [StopAt(2)], given=grpo_objects())
    before = sorted(path for path in first.directory.rglob("*"))
    with pytest.raises(CheckpointError, match="needs Python objects"):
        whet.resume(first.directory)
    for changes, message in (
        ({"data": {"train": ROWS[::-1], "valid": ROWS[:4]}}, "data 'train' has changed"),
        ({"rewards": {"near": lambda completion: 1}}, "rewards 'near' has changed"),
        ({"rewards": {}}, "rewards 'near' is missing"),
        ({"metrics": {"empty": lambda answers: 1.0}}, "metrics 'empty' has changed"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            resume(first.directory, given=grpo_objects(**changes))
        assert f'whet.resume("{first.directory}", rewards={{"near": ...}}, data=' in caught.value.hint
    assert sorted(path for path in first.directory.rglob("*")) == before
    second = resume(first.directory, given=grpo_objects())
    assert second.steps == 4
    assert same_weights(second.directory, uninterrupted.directory)


def test_records_that_change_during_a_run_stop_it(tiny_directory, tmp_path):
    calls = iter(range(100))
    config = config_without_data(tiny_directory, tmp_path)
    with pytest.raises(DataError, match="have changed since the first pass"):
        train(config, given=collect_given(lambda: [{"text": f"call {next(calls)}"}]))


def test_run_with_python_objects_is_loaded_reported_and_exported_without_them(tiny_directory, tmp_path):
    """Runs in another process, in which importing the user's code fails."""
    objects = grpo_objects()
    run = train(grpo_config(tiny_directory, tmp_path), given=objects).directory
    run_commands(
        ["report", run],
        ["runs", run.parent],
        ["export", run, "--to", "hf"],
        ["generate", run, "2+2=", "--max-tokens", "2"],
        cwd=tmp_path,
    )
    assert "python:near:" in (run / "report.html").read_text()
    model, _ = whet.load(run, device="cpu", dtype=torch.float32)
    assert model.vocab_size == 260
    (run / "final").rename(run / "elsewhere")
    shown = whet_command("resume", run, cwd=tmp_path)
    assert shown.returncode == 2
    stderr = " ".join(shown.stderr.split())
    assert 'rewards={"near": ...}' in stderr
    assert "Traceback" not in stderr
    shown = whet_command("train", run / "config.yaml", "run.name=again", cwd=tmp_path)
    assert shown.returncode == 2
    assert "needs Python objects" in shown.stderr


def whet_command(*arguments, cwd):
    command = [sys.executable, "-m", "whet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_python_api_example_program(tiny_directory, tmp_path):
    """Run the program that the Python API is designed around, with the settings of a short run."""
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(12)]
    base = {"model": str(tiny_directory), "data": {"max_length": 64}, "eval": {"max_new_tokens": 4}}
    base["run"] = {"dir": str(tmp_path), "steps": 2, "batch_size": 4, "device": "cpu"}
    grpo = {"kind": "grpo", "group_size": 2, "max_new_tokens": 4}

    def json_rate(answers, records):
        return sum(answer.isdecimal() for answer in answers) / len(answers)

    def short(prompt, completion, record):
        return -float(len(completion))

    class Smoothed(whet.Objective):
        likelihood = True

        def weights(self, batch):
            return {"loss": float(batch.supervised)}

        def loss(self, model, batch):
            logits = model.logits(model.states(batch)).float()
            summed = F.cross_entropy(logits, batch.supervised_targets, label_smoothing=0.1, reduction="sum")
            return whet.Loss({"loss": summed})

    def named(name):
        return {**base, "run": {**base["run"], "name": name}}

    first = whet.train(
        named("a"), data={"train": rows, "valid": rows[:5]}, metrics={"json_rate": json_rate}, verbose=0
    )
    assert 0 <= first.metrics["eval_json_rate"] <= 1
    rewarded = whet.train(
        {**named("b"), "objective": grpo}, data={"train": rows}, rewards={"short": short}, verbose=0
    )
    assert rewarded.metrics["reward_mean"] <= 0

    class Stop(whet.Callback):
        def on_step_end(self, step, metrics):
            return whet.StopRun("enough", unfinished=True) if step == 1 else None

    run = whet.train(named("c"), [Stop()], data={"train": rows}, objective=Smoothed(), verbose=0)
    assert run.unfinished
    with pytest.raises(CheckpointError):  # hashes are checked
        whet.resume(run.directory, data={"train": rows[1:]}, objective=Smoothed(), verbose=0)
    again = whet.resume(run.directory, data={"train": rows}, objective=Smoothed(), verbose=0)
    assert (again.steps, again.unfinished) == (2, False)
