"""Throughput, budgets and samples of a run."""

import json
import sys

import pytest
import torch

import whet
from tiny import run_config
from whet.config.load_config import validate_config
from whet.errors import ConfigError, DataError
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, StopRun
from whet.training.observe.samples import SampleGenerations
from whet.training.observe.step_flops import training_flops_per_token


def rows(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == self.step else None


def test_throughput_covers_the_last_steps_without_evaluations():
    clock = [0.0]
    monitor = whet.ThroughputMonitor(2, flops_per_token=3e9, peak_tflops=0.5)

    def step(seconds, tokens, total):
        clock[0] += seconds
        metrics = {"tokens": tokens, "tokens_total": total, "step_s": seconds, "elapsed_s": clock[0]}
        monitor.on_step_end(1, metrics)
        return metrics

    clock[0] = 100.0  # whatever happened before the first step
    first = step(2.0, 50, 50)
    assert first["steps_per_s"] == pytest.approx(0.5)
    assert first["mean_tokens_per_s"] == pytest.approx(25)
    clock[0] += 7.0
    monitor.on_eval_end(1, {"eval_s": 7.0})
    second = step(3.0, 100, 150)
    assert second["steps_per_s"] == pytest.approx(2 / 5)
    assert second["mean_tokens_per_s"] == pytest.approx(150 / 5)
    third = step(1.0, 100, 250)  # the first has left the window
    assert third["steps_per_s"] == pytest.approx(2 / 4)
    assert third["tflops_per_s"] == pytest.approx(3e9 * 200 / 4 / 1e12)
    assert third["mfu"] == pytest.approx(3e9 * 200 / 4 / 1e12 / 0.5)
    assert third["flops_total"] == pytest.approx(3e9 * 250)
    with pytest.raises(ConfigError, match="every must be >= 1, not 0"):
        whet.ThroughputMonitor(0)


def test_every_metrics_row_has_throughput(tiny_directory, tmp_path):
    actual = [
        row for row in rows(whet.train(run_config(tiny_directory, tmp_path)).directory) if "loss" in row
    ]
    for row in actual:
        assert row["steps_per_s"] > 0
        assert row["flops_total"] / row["tokens_total"] == pytest.approx(
            actual[0]["flops_total"] / actual[0]["tokens_total"]
        )
    assert "mfu" not in actual[0], "nobody knows the peak of this processor"
    model, _ = whet.load(tiny_directory)
    whet.attach_lora(model, rank=4)
    share = actual[0]["supervised_tokens"] / actual[0]["tokens"]
    expected = training_flops_per_token(model, SFT(), length=110, supervised=share)
    assert actual[0]["flops_total"] / actual[0]["tokens_total"] == pytest.approx(expected, rel=0.02)
    # by hand: q and o of 32 x 32, k and v of 32 x 16, three of 32 x 64, scores of half a document, the head
    layer = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64) + 2 * 2 * 32 * 110 / 2
    forward = 2 * layer + share * 2 * 32 * 260
    assert 2 * forward < expected < 3 * forward, "back through frozen weights, and small adapters"


def test_flops_budget_finishes_the_run(tiny_directory, tmp_path):
    plain = [
        row
        for row in rows(whet.train(run_config(tiny_directory, tmp_path / "plain")).directory)
        if "loss" in row
    ]
    limit = (plain[1]["flops_total"] + plain[2]["flops_total"]) / 2
    config = run_config(tiny_directory, tmp_path, run={"budget": {"flops": limit}})
    result = whet.train(config)
    assert result.steps == 3, "the first step at which it is spent"
    assert "FLOPs is spent" in result.stopped_because
    assert not result.unfinished
    assert (result.directory / "final").is_dir()
    assert rows(result.directory)[-1]["summary"]["steps"] == 3


def test_budget_counts_across_resumes(tiny_directory, tmp_path):
    plain = [
        row
        for row in rows(whet.train(run_config(tiny_directory, tmp_path / "plain")).directory)
        if "loss" in row
    ]
    limit = (plain[1]["flops_total"] + plain[2]["flops_total"]) / 2
    first = whet.train(run_config(tiny_directory, tmp_path, run={"budget": {"flops": limit}}), [StopAt(2)])
    assert first.unfinished
    assert whet.resume(first.directory).steps == 3


def test_minutes_budget_finishes_the_run(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, run={"budget": {"minutes": 1e-9}}))
    assert result.steps == 1
    assert "minutes is spent" in result.stopped_because
    assert (result.directory / "final").is_dir()


def test_invalid_budgets_are_rejected(tiny_directory, tmp_path):
    with pytest.raises(ConfigError, match="a budget needs flops, minutes or both"):
        validate_config(run_config(tiny_directory, tmp_path, run={"budget": {}}))
    with pytest.raises(ConfigError, match="a budget in FLOPs needs flops_per_token"):
        whet.Budget(flops=1.0)


def test_samples_are_generated_before_during_and_after_training(tiny_directory, tmp_path):
    prompts = ["Turn on the lamp", "Hello"]
    log = {"samples": {"prompts": prompts, "every": 2, "max_tokens": 5}}
    result = whet.train(
        run_config(tiny_directory, tmp_path, method={"kind": "full"}, run={"steps": 5}, log=log)
    )
    samples = rows(result.directory, "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in samples] == [
        (n, p) for n in (0, 2, 4, 5) for p in prompts
    ]
    for step, directory in ((0, tiny_directory), (5, result.directory)):
        model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
        expected = [whet.generate(model, tokenizer, prompt, max_tokens=5) for prompt in prompts]
        assert [row["completion"] for row in samples if row["step"] == step] == expected
    assert samples[0]["completion"] != samples[-2]["completion"]


def test_resumed_run_writes_each_sample_once(tiny_directory, tmp_path):
    log = {"samples": {"prompts": ["Hello"], "every": 1, "max_tokens": 3}}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", log=log))
    config = run_config(tiny_directory, tmp_path / "stopped", log=log, checkpoint={"every": 2})

    class Fail(Callback):
        def on_step_end(self, step, metrics):
            if step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        whet.train(config, [Fail()])
    directory = tmp_path / "stopped" / "runs" / "test"
    assert [row["step"] for row in rows(directory, "samples.jsonl")] == [0, 1, 2, 3]
    whet.resume(directory)
    assert rows(directory, "samples.jsonl") == rows(plain.directory, "samples.jsonl")
    assert [row["step"] for row in rows(directory, "samples.jsonl")] == [0, 1, 2, 3, 4]


def test_finished_run_has_all_its_samples(tiny_directory, tmp_path, monkeypatch):
    log = {"samples": {"prompts": ["Hello"], "max_tokens": 3}}
    config = run_config(tiny_directory, tmp_path, log=log)
    with monkeypatch.context() as context:
        context.setattr(SampleGenerations, "on_train_end", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            whet.train(config)
    whet.resume(tmp_path / "runs" / "test")
    assert [row["step"] for row in rows(tmp_path / "runs" / "test", "samples.jsonl")] == [0, 4]


def test_impossible_samples_are_rejected(tiny_directory, tmp_path):
    log = {"samples": {"prompts": ["x" * 600]}}
    with pytest.raises(DataError, match="leaves no room"):
        whet.train(run_config(tiny_directory, tmp_path, log=log))
    quality = {
        "model": {"quality": "nano"},
        "log": {"samples": {"prompts": ["x"]}},
        "run": {"dir": str(tmp_path / "q")},
    }
    with pytest.raises(ConfigError, match="log.samples needs a model that generates text"):
        whet.train(quality)
    assert not (tmp_path / "q").exists()
