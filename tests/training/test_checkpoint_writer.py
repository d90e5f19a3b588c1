"""Asynchronous saves: checkpoints have the state at the time of the save, and training hardly waits."""

import errno
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.config.run import Checkpoint
from whet.errors import RunError
from whet.training.callbacks import Callback, StopRun
from whet.training.checkpoint import checkpoint_contents, checkpoint_path, read_checkpoint_state
from whet.training.checkpoint_writer import CheckpointWriter


@pytest.fixture
def gate(monkeypatch):
    """Block the first write until the event is set."""
    opened = threading.Event()

    def boundary(operation, path):
        if operation == "write":
            assert opened.wait(20), "nobody opened the gate"

    monkeypatch.setattr("whet.storage.before_file_operation", boundary)
    yield opened
    opened.set()


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_checkpoint_has_the_state_at_save_time(tmp_path, gate):
    model, optimizer = parts()
    counts = {"seen": [1, 2]}
    weights = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    saver = CheckpointWriter(tmp_path, Checkpoint())
    saver.save(1, checkpoint_contents(model, optimizer, 1, {"counts": counts}), best_steps=())
    saver.wait_for_copy()
    step(model, optimizer)  # while the disk still waits
    counts["seen"].append(3)
    assert not list(saver.pop_completed())
    gate.set()
    saver.wait()
    path = checkpoint_path(tmp_path, 1)
    assert list(saver.pop_completed()) == [(1, path)]
    assert torch.equal(load_file(path / "weights.safetensors")["weight"], weights)
    assert torch.equal(load_file(path / "optimizer.safetensors")["weight::exp_avg"], moment)
    assert json.loads((path / "state.json").read_text())["counts"] == {"seen": [1, 2]}
    assert not torch.equal(model.weight, weights)


def test_update_waits_for_the_copy_of_a_save(tiny_directory, tmp_path, monkeypatch):
    """With a slow copy, every checkpoint must still have the exact state of its step."""
    original = CheckpointWriter._snapshot

    def slow(self, contents):
        time.sleep(0.05)
        return original(self, contents)

    sections = {"checkpoint": {"every": 1, "keep": 9}, "method": {"kind": "full"}, "data": {"valid": None}}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", **sections)).directory
    monkeypatch.setattr(CheckpointWriter, "_snapshot", slow)
    delayed = whet.train(run_config(tiny_directory, tmp_path / "delayed", **sections)).directory
    for number in (1, 2, 3, 4):
        for name in ("weights.safetensors", "optimizer.safetensors"):
            a, b = (checkpoint_path(run, number) / name for run in (plain, delayed))
            assert a.read_bytes() == b.read_bytes()


def test_failing_copy_raises_and_does_not_block_updates(tiny_directory, tmp_path, monkeypatch):
    def failing(self, contents):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(CheckpointWriter, "_snapshot", failing)
    with pytest.raises(RunError, match="out of memory .*no room for a copy"):
        whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1}))


def test_saves_are_serialized_and_keep_their_contents(tmp_path, gate):
    model, optimizer = parts()
    saver = CheckpointWriter(tmp_path, Checkpoint(keep=3))
    expected = {}
    threading.Timer(0.2, gate.set).start()
    for number in (1, 2, 3):
        expected[number] = model.weight.detach().clone()
        saver.save(number, checkpoint_contents(model, optimizer, number, None), best_steps=())
        if number == 2:
            assert gate.is_set(), "at most one in flight"
        saver.wait_for_copy()
        step(model, optimizer)
    saver.wait()
    assert [number for number, _ in saver.pop_completed()] == [1, 2, 3]
    for number, weights in expected.items():
        actual = load_file(checkpoint_path(tmp_path, number) / "weights.safetensors")
        assert torch.equal(actual["weight"], weights)


def test_synchronous_save_is_on_disk_when_it_returns(tmp_path):
    model, optimizer = parts()
    saver = CheckpointWriter(tmp_path, Checkpoint(**{"async": False}))
    saver.save(1, checkpoint_contents(model, optimizer, 1, None), best_steps=())
    assert (checkpoint_path(tmp_path, 1) / "MANIFEST.json").is_file()
    assert threading.active_count() == 1 or not any(t.name == "whet-save" for t in threading.enumerate())


def test_on_save_is_called_in_the_main_thread_for_complete_checkpoints(tiny_directory, tmp_path):
    told = []

    class Listen(Callback):
        def on_save(self, step, path):
            whole = (path / "MANIFEST.json").is_file()
            told.append((step, whole, threading.current_thread() is threading.main_thread()))

    whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 9}), [Listen()])
    assert told == [(step, True, True) for step in (1, 2, 3, 4)]


def test_on_save_may_stop_the_run(tiny_directory, tmp_path):
    class Enough(Callback):
        def on_save(self, step, path):
            return StopRun("saved", unfinished=True)

    sections = {"run": {"steps": 50}, "checkpoint": {"every": 2}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections), [Enough()])
    assert result.unfinished
    assert 2 <= result.steps < 50


def test_checkpoint_is_due_by_time(tiny_directory, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("whet.training.checkpoint_writer.time.monotonic", lambda: now[0])
    told = []

    class Clock(Callback):
        def on_step_end(self, step, metrics):
            now[0] += 40.0  # a step takes forty seconds

        def on_save(self, step, path):
            told.append(step)

    sections = {
        "run": {"steps": 9}, "checkpoint": {"every": None, "minutes": 2, "keep": 9, "async": False}, "data": {"valid": None}
    }  # fmt: skip
    whet.train(run_config(tiny_directory, tmp_path, **sections), [Clock()])
    assert told == [3, 6, 9]


def test_lora_checkpoint_contains_only_adapters_and_their_moments(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path))
    checkpoint = result.directory / "checkpoints" / "step-000004"
    weights, moments = (load_file(checkpoint / f"{n}.safetensors") for n in ("weights", "optimizer"))
    assert all("lora_" in name for name in weights)
    assert {name.split("::")[0] for name in moments} == weights.keys()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_checkpoint_loads_as_a_model(tiny_directory, tmp_path, kind):
    sections = {"method": {"kind": kind}, "checkpoint": {"every": 2, "keep": 9}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    tokens = torch.randint(0, 260, (2, 12))
    with torch.no_grad():
        logits = {
            name: whet.load(result.directory / name, device="cpu", dtype=torch.float32)[0](tokens)
            for name in ("checkpoints/step-000002", "checkpoints/step-000004", "final")
        }
    torch.testing.assert_close(logits["checkpoints/step-000004"], logits["final"])
    assert not torch.allclose(logits["checkpoints/step-000002"], logits["final"], atol=1e-3)


def test_loading_a_checkpoint_outside_a_run_has_a_hint(tiny, tmp_path):
    whet.save_checkpoint(tmp_path / "alone", tiny[0])
    with pytest.raises(whet.WhetError, match="outside of a run directory") as caught:
        whet.load(tmp_path / "alone")
    assert "load_checkpoint" in caught.value.hint
    model, _ = tiny
    with torch.no_grad():
        model.norm.weight.zero_()
    whet.load_checkpoint(tmp_path / "alone", model)
    assert model.norm.weight.abs().sum() > 0


def test_lost_best_checkpoint_falls_back_to_the_last_weights(tiny_directory, tmp_path, monkeypatch, caplog):
    losses = iter([5.0, 4.0, 4.5, 4.5, 4.5])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})

    class Spoil(Callback):
        def on_step_end(self, step, metrics):
            if step == 3:
                (tmp_path / "runs/test/checkpoints/step-000001/weights.safetensors").write_bytes(b"")

    sections = {"eval": {"every": 1, "early_stop": {"patience": 2}}, "checkpoint": {"async": False}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections), [Spoil()])
    assert "the best weights cannot be restored, using the last ones" in caplog.text
    last = load_file(result.directory / "checkpoints" / "step-000003" / "weights.safetensors")
    final = load_file(result.directory / "final" / "adapter_model.safetensors")
    name = "layers.0.self_attn.q_proj.lora_B"
    assert torch.equal(final[f"base_model.model.model.{name}.weight"], last[name])


def test_unsaved_best_step_falls_back_to_the_previous_best(tiny_directory, tmp_path, monkeypatch, caplog):
    losses = iter([9.0, 5.0, 4.0, 8.0, 8.0, 8.0, 8.0])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})

    def boundary(operation, path):
        if "step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("whet.storage.before_file_operation", boundary)
    sections = {
        "run": {"steps": 6}, "checkpoint": {"every": 1, "keep": 1, "async": False},
        "eval": {"every": 1, "early_stop": {"patience": 9}},
    }  # fmt: skip
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert result.best["step"] == 2
    kept = sorted(path.name for path in (result.directory / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000006"]
    assert (
        "the weights of step 2, the best by eval_loss, cannot be restored; using those of step 1"
        in caplog.text
    )
    before = load_file(result.directory / "checkpoints" / "step-000001" / "weights.safetensors")
    final = load_file(result.directory / "final" / "adapter_model.safetensors")
    name = "layers.0.self_attn.q_proj.lora_B"
    assert torch.equal(final[f"base_model.model.model.{name}.weight"], before[name])


def test_checkpoint_state_may_be_large(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"step": 1, "rollout": "x" * 33 * 2**20}))
    assert read_checkpoint_state(tmp_path)["step"] == 1
