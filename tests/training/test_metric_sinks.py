"""Sinks: the calls to each library, and that no sink can stop or slow a run."""

import importlib.util
import json
import math
import sqlite3
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

import whet
from tiny import run_config
from whet.errors import ConfigError, StorageError
from whet.training.callbacks import Callback, StopRun
from whet.training.observe import metric_sinks, sink_backends
from whet.training.observe.metric_sinks import RunInfo, SinkCallback, flatten_metrics
from whet.training.observe.sink_backends import SINKS, check_sinks


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("the test says so", unfinished=True) if step == self.step else None


class Recorder:
    """Stand-in for a tracking library that records every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))

        return call


def facts(tmp_path, **changes):
    given = {
        "name": "one",
        "project": "runs",
        "directory": tmp_path,
        "config": {"optim": {"lr": 0.1}, "none": None},
    }
    return RunInfo(**{**given, "step": 0, "identity": None, **changes})


def test_flatten_metrics_names():
    row = {"loss": 1.5, "skipped": True, "share": [0.25, None, 0.75], "gluing": {"0-1": 2}, "note": "text"}
    assert dict(flatten_metrics(row)) == {
        "loss": 1.5,
        "skipped": 1.0,
        "share/0": 0.25,
        "share/2": 0.75,
        "gluing/0-1": 2.0,
    }


def test_tensorboard_calls(tmp_path, monkeypatch):
    writer, opened = Recorder(), []
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda *args, **kwargs: opened.append((args, kwargs)) or writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    sink = SINKS["tensorboard"]()
    sink.start(facts(tmp_path))
    sink.write(3, {"loss": 1.5, "lr": 0.1})
    sink.finish()
    assert opened == [((str(tmp_path / "tensorboard"),), {"purge_step": None})]
    assert writer.calls == [
        ("add_scalar", ("loss", 1.5, 3), {}),
        ("add_scalar", ("lr", 0.1, 3), {}),
        ("close", (), {}),
    ]
    sink.start(facts(tmp_path, step=7))
    assert opened[1][1] == {"purge_step": 8}, "what came after the checkpoint is hidden"


def test_wandb_calls(tmp_path, monkeypatch):
    run, opened = Recorder(), []
    fake = SimpleNamespace(init=lambda **kwargs: opened.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = SINKS["wandb"]()
    identity = sink.start(facts(tmp_path))
    sink.write(3, {"loss": 1.5})
    sink.finish()
    assert opened[0].pop("config") == {"optim": {"lr": 0.1}, "none": None}
    assert opened == [
        {"project": "runs", "name": "one", "id": identity, "resume": "allow", "dir": str(tmp_path)}
    ]
    assert run.calls == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 3, "loss": 1.5},), {}),
        ("finish", (), {}),
    ]
    assert sink.start(facts(tmp_path, identity=identity)) == identity
    assert opened[1]["id"] == identity


def test_mlflow_calls(tmp_path, monkeypatch):
    calls = []

    class Client:
        def __getattr__(self, name):
            answers = {
                "get_experiment_by_name": None,
                "create_experiment": "7",
                "create_run": SimpleNamespace(info=SimpleNamespace(run_id="abc")),
            }
            return lambda *args, **kwargs: calls.append((name, args, kwargs)) or answers.get(name)

    tracking, entities = ModuleType("mlflow.tracking"), ModuleType("mlflow.entities")
    tracking.MlflowClient = Client
    entities.Metric = entities.Param = lambda *args: args
    for name, module in {
        "mlflow": ModuleType("mlflow"),
        "mlflow.tracking": tracking,
        "mlflow.entities": entities,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    sink = SINKS["mlflow"]()
    assert sink.start(facts(tmp_path)) == "abc"
    sink.write(3, {"loss": 1.5, "ratio": math.inf})
    sink.finish()
    assert calls[:4] == [
        ("get_experiment_by_name", ("runs",), {}),
        ("create_experiment", ("runs",), {}),
        ("create_run", ("7",), {"run_name": "one"}),
        ("log_batch", ("abc",), {"params": [("optim.lr", "0.1")]}),
    ]
    name, args, kwargs = calls[4]
    assert (name, args) == ("log_batch", ("abc",))
    [(key, value, when, step)] = kwargs["metrics"]
    assert (key, value, step) == ("loss", 1.5, 3)
    assert abs(when / 1000 - time.time()) < 60
    assert calls[5:] == [("set_terminated", ("abc",), {})]
    calls.clear()
    assert sink.start(facts(tmp_path, identity="abc")) == "abc"
    assert calls == [("update_run", ("abc",), {"status": "RUNNING"})]


def test_trackio_calls(tmp_path, monkeypatch):
    run, opened = Recorder(), []
    monkeypatch.setitem(
        sys.modules, "trackio", SimpleNamespace(init=lambda **kwargs: opened.append(kwargs) or run)
    )
    sink = SINKS["trackio"]()
    identity = sink.start(facts(tmp_path))
    sink.write(3, {"loss": 1.5})
    sink.finish()
    assert identity.startswith("one-")
    assert opened == [
        {
            "project": "runs",
            "name": identity,
            "config": {"optim": {"lr": 0.1}, "none": None},
            "resume": "allow",
        }
    ]
    assert run.calls == [("log", ({"loss": 1.5},), {"step": 3}), ("finish", (), {})]


class Fake:
    """A sink that stores its rows."""

    def __init__(self):
        self.started, self.rows, self.finished = [], [], 0

    def start(self, run):
        self.started.append(run)
        return run.identity or "the-first"

    def write(self, step, numbers):
        self.rows.append((step, numbers))

    def finish(self):
        self.finished += 1


def use(monkeypatch, sink):
    """Make `log.sinks: [wandb]` use the given sink."""
    monkeypatch.setattr(sink_backends, "check_sinks", lambda names: None)
    monkeypatch.setitem(SINKS, "wandb", lambda: sink)


def test_sink_gets_the_row_of_the_last_step(tiny_directory, tmp_path, monkeypatch):
    fake = Fake()
    use(monkeypatch, fake)
    log = {"sinks": ["wandb"], "every": 3}
    whet.train(run_config(tiny_directory, tmp_path, log=log, data={"valid": None}))
    assert [step for step, _ in fake.rows] == [3, 4]


def test_sink_gets_all_rows_of_a_run_and_its_resume(tiny_directory, tmp_path, monkeypatch):
    fake = Fake()
    use(monkeypatch, fake)
    sections = {
        "log": {"sinks": ["wandb"], "every": 2, "probes": {"weights": 3}},
        "data": {"test": "synth:house-test:3"},
    }
    first = whet.train(run_config(tiny_directory, tmp_path, **sections), [StopAt(3)])
    result = whet.resume(first.directory)
    names = {step: [sorted(numbers) for at, numbers in fake.rows if at == step] for step, _ in fake.rows}
    assert list(names) == [0, 2, 3, 4], "log.every, and where a probe was"
    assert any("eval_loss" in actual for actual in names[0])
    assert any("exp_weight_distance_layer/1" in actual for actual in names[3])
    assert any("test_loss" in actual for actual in names[4])
    assert [(run.name, run.project, run.step, run.identity) for run in fake.started] == [
        ("test", "runs", 0, None),
        ("test", "runs", 3, "the-first"),
    ]
    assert fake.started[0].config["optim"]["lr"] == 0.01
    assert fake.finished == 2
    assert result.steps == 4


def test_sink_rows_after_a_resume_match_the_file(tiny_directory, tmp_path, monkeypatch):
    fake = Fake()
    use(monkeypatch, fake)
    config = run_config(
        tiny_directory, tmp_path, log={"sinks": ["wandb"], "every": 3}, run={"steps": 6}, data={"valid": None}
    )
    result = whet.resume(whet.train(config, [StopAt(5)]).directory)
    written = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], row["loss"], row["tokens"]) for row in written if "loss" in row]
    assert [(step, row["loss"], row["tokens"]) for step, row in fake.rows] == expected


class Raising(Fake):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def __getattribute__(self, name):
        if name == super().__getattribute__("where"):
            raise SystemExit("the server says no\nand more")
        return super().__getattribute__(name)


@pytest.mark.parametrize("where", ["start", "write", "finish"])
def test_rows_of_a_failing_sink_are_written_to_a_file(tiny_directory, tmp_path, monkeypatch, caplog, where):
    use(monkeypatch, Raising(where))
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}))
    assert result.steps == 4
    assert [
        row["step"]
        for row in map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ] == [1, 2, 3, 4]
    said = [record.message for record in caplog.records if "sink" in record.message]
    kept = result.directory / "sink-wandb.jsonl"
    reason = "SystemExit: the server says no"
    assert said == [f"sink wandb failed: {reason}; its rows are written to {kept} instead"]
    assert [row["step"] for row in rows_of(kept) if "loss" in row] == (
        [] if where == "finish" else [1, 2, 3, 4]
    )


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


class Flaky(Fake):
    """A sink whose first calls fail, and those from a given step on."""

    def __init__(self, failures, broken_from=100):
        super().__init__()
        self.failures, self.broken_from, self.calls = failures, broken_from, 0

    def start(self, run):
        self._reset()
        return super().start(run)

    def write(self, step, numbers):
        self._reset(broken=step >= self.broken_from)
        super().write(step, numbers)

    def _reset(self, *, broken=False):
        self.calls += 1
        self.failures -= 1
        if self.failures >= 0 or broken:
            raise ConnectionResetError(104, "Connection reset by peer")


def test_failed_sink_call_is_retried(tiny_directory, tmp_path, monkeypatch, caplog):
    fake = Flaky(failures=3)
    use(monkeypatch, fake)
    monkeypatch.setattr(metric_sinks, "_RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}, data={"valid": None}))
    assert [step for step, _ in fake.rows] == [1, 2, 3, 4]
    assert fake.finished == 1
    assert "sink" not in caplog.text
    assert not (result.directory / "sink-wandb.jsonl").exists()


def test_broken_sink_writes_remaining_rows_to_a_file(tiny_directory, tmp_path, monkeypatch, caplog):
    fake = Flaky(failures=0, broken_from=3)
    use(monkeypatch, fake)
    monkeypatch.setattr(metric_sinks, "_RETRY_DELAYS_S", (0.01, 0.01))
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}, data={"valid": None}))
    assert [step for step, _ in fake.rows] == [1, 2]
    assert fake.calls == 1 + 2 + 3, "row 3 was tried three times, row 4 not any more"
    kept = rows_of(result.directory / "sink-wandb.jsonl")
    assert [row["step"] for row in kept] == [3, 4]
    expected = [row for row in rows_of(result.directory / "metrics.jsonl") if "loss" in row]
    assert [row["loss"] for row in kept] == [row["loss"] for row in expected[2:]]
    assert caplog.text.count("sink wandb failed: ConnectionResetError") == 1


def test_retry_delay_does_not_delay_the_end_of_the_run(tiny_directory, tmp_path, monkeypatch):
    use(monkeypatch, Flaky(failures=1000))
    monkeypatch.setattr(metric_sinks, "_RETRY_DELAYS_S", (600.0, 600.0))
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}, data={"valid": None}))
    kept = rows_of(result.directory / "sink-wandb.jsonl")
    assert [row["step"] for row in kept] == [1, 2, 3, 4]


def test_full_disk_for_sink_rows_does_not_stop_the_run(tiny_directory, tmp_path, monkeypatch):
    def full(path, text):
        raise StorageError(f"{path} could not be written: No space left on device")

    use(monkeypatch, Flaky(failures=1000))
    monkeypatch.setattr(metric_sinks, "_RETRY_DELAYS_S", ())
    monkeypatch.setattr(metric_sinks, "append_text", full)
    assert whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]})).steps == 4


def test_hanging_sink_does_not_delay_the_run(tiny_directory, tmp_path, monkeypatch, caplog):
    """No step waits; at the end of the run the sink is abandoned after a timeout."""
    release = threading.Event()

    class Hanging(Fake):
        def write(self, step, numbers):
            release.wait(30)

    use(monkeypatch, Hanging())
    monkeypatch.setattr(metric_sinks, "_MAX_QUEUED_ROWS", 2)
    slow = SinkCallback.__init__
    monkeypatch.setattr(
        SinkCallback, "__init__", lambda self, *args, **keys: slow(self, *args, **keys, close_timeout_s=0.2)
    )
    try:
        result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}))
    finally:
        release.set()
    steps = [row for row in result.history if "loss" in row]
    assert len(steps) == 4
    assert steps[-1]["elapsed_s"] < 20
    said = [record.message for record in caplog.records if "sink" in record.message]
    kept = result.directory / "sink-wandb.jsonl"
    assert said == [
        f"the queue of sink wandb is full (2 rows): further rows are written to {kept}",
        f"sink wandb did not finish within 0.2 s after the run: its remaining rows are in {kept}",
    ]
    assert sorted(row["step"] for row in rows_of(kept) if "loss" in row) == [1, 2, 3, 4]


def test_failed_run_closes_its_sinks(tiny_directory, tmp_path, monkeypatch):
    fake = Fake()
    use(monkeypatch, fake)

    class Fail(Callback):
        def on_step_end(self, step, metrics):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}), [Fail()])
    assert fake.finished == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "whet-wandb"]


def test_missing_sink_package_is_an_error_before_the_run(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match="log.sinks: trackio is not installed") as caught:
        whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["trackio"]}))
    assert 'pip install "whet[trackio]"' in caught.value.hint
    assert not (tmp_path / "runs").exists()
    check_sinks([])


needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in SINKS
}


@needs["tensorboard"]
def test_real_tensorboard(tiny_directory, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = run_config(tiny_directory, tmp_path, log={"sinks": ["tensorboard"]})
    result = whet.resume(whet.train(config, [StopAt(2)]).directory)
    events = EventAccumulator(str(result.directory / "tensorboard"))
    events.Reload()
    expected = [
        row["loss"]
        for row in map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ]
    actual = events.Scalars("loss")
    assert [event.step for event in actual] == [1, 2, 3, 4]
    assert [event.value for event in actual] == pytest.approx(expected)


@needs["wandb"]
def test_real_wandb_offline(tiny_directory, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["wandb"]}))
    assert list((result.directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert "sink" not in caplog.text


@needs["mlflow"]
def test_real_mlflow(tiny_directory, tmp_path, monkeypatch, caplog):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = whet.resume(
        whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["mlflow"]}), [StopAt(2)]).directory
    )
    assert "sink" not in caplog.text
    client = MlflowClient()
    experiment = client.get_experiment_by_name("runs")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["run.steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert history[-1].value == pytest.approx(result.metrics["loss"])


@needs["trackio"]
def test_real_trackio(tiny_directory, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    result = whet.train(run_config(tiny_directory, tmp_path, log={"sinks": ["trackio"]}))
    assert "sink" not in caplog.text
    with sqlite3.connect(tmp_path / "trackio" / "runs.db") as store:
        kept = [
            (step, json.loads(text))
            for step, text in store.execute("SELECT step, metrics FROM metrics ORDER BY id")
        ]
    assert [(step, actual["loss"]) for step, actual in kept if "loss" in actual] == [
        (row["step"], row["loss"]) for row in result.history if "loss" in row
    ]
