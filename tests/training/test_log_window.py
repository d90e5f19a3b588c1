"""Rows of several steps: means over all steps, exact across a resume; memory and totals over all parts."""

import json
import math

import pytest

import whet
from tiny import run_config
from whet.training import trainer as train_step
from whet.training.callbacks import Callback, StopRun
from whet.training.observe.log_window import LogWindow
from whet.training.observe.metrics_logger import MetricsLogger
from whet.training.state import RunState

TIMES = (
    "tokens_per_s",
    "step_s",
    "elapsed_s",
    "steps_per_s",
    "mean_tokens_per_s",
    "tflops_per_s",
    "peak_gib",
)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("the test says so", unfinished=True) if step == self.step else None


def rows(directory):
    actual = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in actual if "loss" in row]


def exact(actual):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in actual]


def trained(tiny_directory, tmp_path, name, *, every, callbacks=(), steps=7, **sections):
    sections["run"] = {"name": name, "steps": steps, **sections.get("run", {})}
    config = run_config(tiny_directory, tmp_path, log={"every": every}, **sections)
    config["data"]["valid"] = None
    return whet.train(config, callbacks)


def mean(actual, name, weight=None):
    """Compute a mean from the rows of single steps."""
    weights = [1 if weight is None else row[weight] for row in actual]
    return sum(w * row[name] for w, row in zip(weights, actual, strict=True)) / sum(weights)


def test_row_aggregates_the_steps_since_the_previous_row(tiny_directory, tmp_path):
    single = rows(trained(tiny_directory, tmp_path, "single", every=1).directory)
    actual = rows(trained(tiny_directory, tmp_path, "several", every=3).directory)
    assert [row["step"] for row in actual] == [3, 6, 7]
    assert len({row["supervised_tokens"] for row in single}) > 1, "else weights would not show"
    for row, start in zip(actual, (0, 3, 6), strict=True):
        steps = single[start : row["step"]]
        assert row["loss"] == pytest.approx(mean(steps, "loss", "supervised_tokens"), rel=1e-12)
        assert row["grad_norm"] == pytest.approx(mean(steps, "grad_norm"), rel=1e-12)
        assert row["lr"] == steps[-1]["lr"]
        for name in ("tokens", "supervised_tokens"):
            assert row[name] == sum(step[name] for step in steps)
            assert row[f"{name}_total"] == sum(step[name] for step in single[: row["step"]])
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / (row["step_s"] * len(steps)))
    totals = mean(single, "loss", "supervised_tokens"), mean(actual, "loss", "supervised_tokens")
    assert totals[0] == pytest.approx(totals[1], rel=1e-12), "every step is in one row"


def test_preference_metrics_are_weighted_by_pairs(tiny_directory, tmp_path):
    def train(name, every):
        objective = {"kind": "dpo"}
        data = {"train": "synth:house-pairs:10", "valid": None, "max_length": 256}
        return rows(
            trained(
                tiny_directory, tmp_path, name, every=every, steps=3, objective=objective, data=data
            ).directory
        )

    single, [row] = train("single", 1), train("several", 3)
    pairs = [4, 4, 2]  # ten pairs, in steps of four
    for name in ("loss", "reward_margin", "logprob_chosen"):
        expected = sum(n * step[name] for n, step in zip(pairs, single, strict=True)) / 10
        assert row[name] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_rows_after_a_resume_match_an_uninterrupted_run(tiny_directory, tmp_path, stop):
    whole = trained(tiny_directory, tmp_path, "whole", every=3)
    cut = trained(tiny_directory, tmp_path, "cut", every=3, callbacks=[StopAt(stop)])
    assert cut.unfinished
    resumed = whet.resume(cut.directory)
    assert exact(rows(resumed.directory)) == exact(rows(whole.directory))


def test_older_checkpoints_may_lack_fields():
    state = RunState.from_checkpoint({"step": 4, "tokens_total": 100, "latest": {"peak_gib": 2.0}})
    assert state.count_tokens(10, 5) == {"tokens_total": 110}, "the earlier supervised tokens are unknown"
    assert state.update_peak(1.0) == 2.0
    logger = MetricsLogger("rows.jsonl", every=3)
    logger.restore({})
    assert logger.state() == {}


def test_nonfinite_values_are_left_out_and_counted():
    window = LogWindow()
    steps = [
        {"loss": 1.0, "grad_norm": 3.0, "tokens": 2},
        {"loss": math.nan, "grad_norm": math.inf, "tokens": 2, "skipped": True},
        {"loss": 3.0, "grad_norm": 5.0, "tokens": 2, "note": "text", "shares": [1, 2], "exp_norm": 7.0},
    ]
    for weight, step in zip((1.0, 5.0, 3.0), steps, strict=True):
        window.add(step, weight=weight, weighted=frozenset({"loss"}))
    assert window.row(steps[-1]) == {
        "loss": 2.5, "grad_norm": 4.0, "tokens": 6, "skipped": 1,
        "note": "text", "shares": [1, 2], "exp_norm": 7.0,
    }  # fmt: skip
    nothing = LogWindow()
    for step in 2 * [{"loss": math.nan}]:
        nothing.add(step, weight=1.0, weighted=frozenset({"loss"}))
    assert math.isnan(nothing.row({"loss": math.nan})["loss"])


def test_peak_memory_covers_all_parts_of_a_run(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(train_step, "peak_gib", lambda _: 3.0)
    cut = trained(tiny_directory, tmp_path, "cut", every=1, callbacks=[StopAt(2)], steps=4)
    monkeypatch.setattr(train_step, "peak_gib", lambda _: 1.0)  # another process, which has used less so far
    resumed = whet.resume(cut.directory)
    assert [row["peak_gib"] for row in rows(resumed.directory)] == [3.0] * 4
    assert resumed.summary["final"]["peak_gib"] == 3.0


def test_callbacks_see_the_metrics_of_every_step(tiny_directory, tmp_path):
    seen = []

    class Watch(Callback):
        def on_step_end(self, step, metrics):
            seen.append(metrics["loss"])

    result = trained(tiny_directory, tmp_path, "several", every=3, callbacks=[Watch()])
    assert len(seen) == 7
    assert [row["loss"] for row in result.history] == seen
    assert result.metrics["loss"] == seen[-1]
