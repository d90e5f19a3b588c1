"""Full disk, lost permission, removed directory: the run continues, and saved data is not lost."""

import errno
import io
import json
import os
import shutil
import sqlite3

import pytest
from safetensors.torch import load_file

import whet
from faults.harness import location_of
from tiny import run_config
from whet.errors import RunError, StorageError
from whet.recipes.quality.ledgers import create_ledgers
from whet.storage import append_text, check_manifest, create_directory_atomically, write_text
from whet.training.callbacks import Callback, StopRun

EVERY_STEP = {"checkpoint": {"every": 1, "keep": 3}}


def failing(monkeypatch, number=errno.ENOSPC, *, when):
    """Make file operations raise an OSError if `when(operation, location)`."""

    def boundary(operation, path):
        if when(operation, location_of(path)):
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("whet.storage.before_file_operation", boundary)


def checkpoints(run):
    """Return the names of the checkpoints, and check that each is valid."""
    paths = sorted((run / "checkpoints").glob("*"))
    for path in paths:
        check_manifest(path)
    return [path.name for path in paths]


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("operation", ["mkdir", "open", "write", "fsync", "rename"])
def test_failed_save_only_loses_that_checkpoint(
    tiny_directory, tmp_path, monkeypatch, caplog, operation, asynchronous, record_property
):
    record_property("fault: full disk in one save", 1)
    caplog.set_level("INFO", "whet")
    failing(monkeypatch, when=lambda op, location: op == operation and ("step-000002" in location))
    sections = {"checkpoint": {"every": 1, "keep": 9, "async": asynchronous}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert (result.steps, result.unfinished) == (4, False)
    assert checkpoints(result.directory) == ["step-000001", "step-000003", "step-000004"]
    assert (
        caplog.text.count("No space left on device; the run continues and tries again at the next save") == 1
    )
    assert "saving works again: saved step 3" in caplog.text
    assert not list(result.directory.rglob(".*writing*"))
    monkeypatch.undo()
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "uninterrupted", **sections))
    name = "final/adapter_model.safetensors"
    assert (result.directory / name).read_bytes() == (uninterrupted.directory / name).read_bytes()


def test_full_disk_is_reported_once_and_exits_with_1(
    tiny_directory, tmp_path, monkeypatch, caplog, record_property
):
    record_property("fault: disk that stays full to the end, then room again", 1)
    full_from = 3
    failing(
        monkeypatch,
        when=lambda op, location: (
            any(f"step-{n:06d}" in location for n in range(full_from, 9)) or "final" in location
        ),
    )
    with pytest.raises(StorageError, match=r"final could not be written: No space left on device") as caught:
        whet.train(run_config(tiny_directory, tmp_path, run={"steps": 6}, **EVERY_STEP))
    assert caught.value.exit_code == 1
    assert caplog.text.count("the run continues and tries again") == 1
    run = tmp_path / "runs" / "test"
    assert not (run / "final").exists()
    assert checkpoints(run) == ["step-000001", "step-000002"]
    monkeypatch.undo()
    result = whet.resume(run)
    uninterrupted = whet.train(
        run_config(tiny_directory, tmp_path / "uninterrupted", run={"steps": 6}, **EVERY_STEP)
    )
    name = "final/adapter_model.safetensors"
    assert (result.directory / name).read_bytes() == (uninterrupted.directory / name).read_bytes()
    assert [row["step"] for row in rows(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_failed_last_checkpoint_does_not_affect_the_result(tiny_directory, tmp_path, monkeypatch):
    failing(monkeypatch, when=lambda op, location: "step-000004" in location)
    with pytest.raises(RunError, match="the last checkpoint is missing.*No space left") as caught:
        whet.train(run_config(tiny_directory, tmp_path))
    assert caught.value.exit_code == 1
    assert load_file(tmp_path / "runs" / "test" / "final" / "adapter_model.safetensors")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_other_os_errors_are_handled_the_same_way(
    tiny_directory, tmp_path, monkeypatch, caplog, number, record_property
):
    record_property("fault: permission, quota or device error in one save", 1)
    failing(monkeypatch, number, when=lambda op, location: "step-000002" in location)
    result = whet.train(run_config(tiny_directory, tmp_path, **EVERY_STEP))
    assert result.steps == 4
    assert os.strerror(number) in caplog.text


def test_an_unexpected_error_while_saving_is_not_swallowed(tiny_directory, tmp_path, monkeypatch):
    def boundary(operation, path):
        if "step-000002" in str(path):
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr("whet.storage.before_file_operation", boundary)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        whet.train(run_config(tiny_directory, tmp_path, **EVERY_STEP))


class AtStep(Callback):
    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step_end(self, step, metrics):
        return self.do() if step == self.step else None


@pytest.mark.parametrize("removed", ["checkpoints", "."])
def test_removed_directory_is_recreated_by_the_next_save(tiny_directory, tmp_path, removed, record_property):
    record_property("fault: directory removed under a run", 1)
    run = tmp_path / "runs" / "test"
    remove = AtStep(2, lambda: shutil.rmtree(run / removed, ignore_errors=True))
    stop = AtStep(3, lambda: StopRun("test", unfinished=True))
    first = whet.train(run_config(tiny_directory, tmp_path, **EVERY_STEP), [remove, stop])
    assert first.unfinished
    check_manifest(run / "checkpoints" / "step-000003")
    result = whet.resume(run)
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "uninterrupted", **EVERY_STEP))
    name = "final/adapter_model.safetensors"
    assert (result.directory / name).read_bytes() == (uninterrupted.directory / name).read_bytes()


def test_rows_that_could_not_be_written_are_written_later_once(tiny_directory, tmp_path, monkeypatch, caplog):
    tries = iter(range(1000))
    failing(monkeypatch, when=lambda op, location: op == "append" and 2 <= next(tries) < 5)
    result = whet.train(run_config(tiny_directory, tmp_path, run={"steps": 8}, data={"valid": None}))
    assert [row.get("step") for row in rows(result.directory)] == [1, 2, 3, 4, 5, 6, 7, 8, None]
    assert caplog.text.count("its rows are kept in memory and written later") == 1


def test_row_is_appended_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_text(path, "one\n")

    class Full(io.FileIO):
        def write(self, data):
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode):
        return Full(path, mode)

    monkeypatch.setattr("pathlib.Path.open", opened)
    with pytest.raises(StorageError, match=r"metrics.jsonl could not be written: No space left"):
        append_text(path, "two is longer\n")
    monkeypatch.undo()
    append_text(path, "three\n")
    assert path.read_text() == "one\nthree\n"


def test_directory_is_written_atomically_and_never_overwritten(tmp_path, monkeypatch):
    def fill(meanwhile):
        with create_directory_atomically(tmp_path / "d") as staging:
            write_text(staging / "a", "mine")
            meanwhile()

    def somebody_else():
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "b").write_text("somebody else's")

    with pytest.raises(ZeroDivisionError):
        fill(lambda: 1 / 0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(whet.WhetError, match="never overwrites existing files"):
        fill(somebody_else)
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "b"]


def test_run_that_cannot_start_reports_path_and_reason(tiny_directory, tmp_path, monkeypatch):
    failing(monkeypatch, when=lambda op, location: "config.yaml" in location)
    with pytest.raises(StorageError, match=r"runs/test could not be written: No space left on device"):
        whet.train(run_config(tiny_directory, tmp_path))
    assert not list((tmp_path / "runs").iterdir())


def test_nonfinite_step_on_full_disk_is_reported(tiny_directory, tmp_path, monkeypatch):
    from whet.objectives.sft import SFT

    original = SFT.loss

    def poisoned(self, model, batch):
        result = original(self, model, batch)
        return type(result)({"loss": result.sums["loss"] * (float("nan") if model.training else 1.0)})

    monkeypatch.setattr(SFT, "loss", poisoned)
    failing(monkeypatch, when=lambda op, location: "nonfinite-step" in location.rpartition("/")[2])
    with pytest.raises(RunError, match=r"step 1: loss nan.*nonfinite-step-000001.json could not be written"):
        whet.train(run_config(tiny_directory, tmp_path))


def test_every_writer_reports_a_full_disk(tmp_path, monkeypatch):
    """Also libraries with their own exception types."""
    message = "No space left on device (os error 28)"
    named = pytest.raises(StorageError, match="tokenizer could not be written: No space left on device")
    with named, create_directory_atomically(tmp_path / "tokenizer"):
        raise Exception(message)
    with pytest.raises(ValueError, match="another"), create_directory_atomically(tmp_path / "tokenizer"):
        raise ValueError("another")
    assert not list(tmp_path.iterdir())

    def full(path):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(StorageError, match=r"\.db could not be written: database or disk is full"):
        create_ledgers(tmp_path / "ledgers", 8)
