"""Damaged run directories: every command handles them or reports one clear error."""

import json
import logging
import shutil

import pytest
from typer.testing import CliRunner

import whet
from tiny import run_config
from whet.cli.app import app
from whet.errors import CheckpointError
from whet.run_directory import move_superseded_rows
from whet.training.checkpoint import prune_checkpoints


@pytest.fixture(scope="module")
def stopped(tiny_directory, tmp_path_factory):
    """A run of four steps whose last checkpoint is at step 3, so that it can be resumed."""
    directory = tmp_path_factory.mktemp("stopped")
    result = whet.train(
        run_config(tiny_directory, directory, checkpoint={"every": 3, "keep": 2}, eval={"every": 2})
    )
    shutil.rmtree(result.directory / "final")
    shutil.rmtree(result.directory / "checkpoints" / "step-000004")
    return result.directory


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_rows(run, rows):
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_resume_warns_about_missing_rows(run, caplog):
    remaining = [row for row in rows_of(run) if row.get("step") != 2]
    write_rows(run, remaining)
    with caplog.at_level(logging.WARNING, logger="whet"):
        whet.resume(run)
    warnings = [line for line in warnings_of(caplog) if "metrics.jsonl" in line]
    assert len(warnings) == 1
    assert "no training row for step 2" in warnings[0]
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 3, 4]


def test_resume_of_an_intact_run_does_not_warn(run, caplog):
    with caplog.at_level(logging.WARNING, logger="whet"):
        whet.resume(run)
    assert not warnings_of(caplog)
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4]


def test_rows_skipped_by_log_every_are_not_reported_missing(tiny_directory, tmp_path, caplog):
    config = run_config(
        tiny_directory, tmp_path, log={"every": 2}, checkpoint={"every": 3, "keep": 2}, run={"steps": 6}
    )
    result = whet.train(config)
    shutil.rmtree(result.directory / "final")
    shutil.rmtree(result.directory / "checkpoints" / "step-000006")
    config_file = result.directory / "config.yaml"
    with caplog.at_level(logging.WARNING, logger="whet"):
        config_file.write_text(config_file.read_text().replace("every: 2", "every: 1"))
        whet.resume(result.directory)
    assert not warnings_of(caplog)


INVALID_STEPS = [None, "3", [1], {"a": 1}, 1.5, True, -1, 10**400, "nan"]


@pytest.mark.parametrize("step", INVALID_STEPS, ids=lambda step: json.dumps(step)[:12])
def test_row_with_an_invalid_step_is_moved_aside(run, stopped, step):
    rows = rows_of(run)
    write_rows(run, [*rows[:2], {"step": step, "loss": 1.0}, *rows[2:]])
    for command in ("report", "runs", "compare", "resume"):
        arguments = [run.parent] if command == "runs" else [run, stopped] if command == "compare" else [run]
        answer = CliRunner().invoke(app, [command, *map(str, arguments)])
        assert answer.exit_code == 0, (command, answer.output)
        assert "unexpected" not in answer.output
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4]
    assert json.dumps({"step": step, "loss": 1.0}) in (run / "metrics.superseded.jsonl").read_text()


@pytest.mark.parametrize("step", INVALID_STEPS, ids=lambda step: json.dumps(step)[:12])
def test_run_with_invalid_steps_and_no_checkpoint_restarts(run, step):
    shutil.rmtree(run / "checkpoints")
    write_rows(run, [{"step": step, "loss": 1.0}])
    assert whet.resume(run).steps == 4


@pytest.mark.parametrize("name", ["step-²", "step-٣", "step-", "step-1e3", "step-x", "step--1"])
def test_directories_without_a_step_number_are_not_checkpoints(run, name):
    odd = run / "checkpoints" / name
    odd.mkdir()
    for command in ("report", "resume", "export"):
        arguments = ["--to", "hf", "--out", str(run.parent / "out")] if command == "export" else []
        answer = CliRunner().invoke(app, [command, str(run), *arguments])
        assert answer.exit_code == 0, (command, answer.output)
    assert odd.is_dir(), "it belongs to somebody else"


def test_resuming_a_missing_run_raises(tmp_path):
    with pytest.raises(CheckpointError, match="nothere does not exist"):
        whet.resume(tmp_path / "nothere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file, not a run directory"):
        whet.resume(tmp_path / "file")
    with pytest.raises(CheckpointError, match="is not a run: it has no config.yaml"):
        whet.resume(tmp_path)


def test_surplus_checkpoint_is_removed_on_resume(tiny_directory, tmp_path):
    """A process killed between writing a checkpoint and removing the oldest leaves one more than `keep`."""
    result = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 10}))
    shutil.rmtree(result.directory / "final")
    config = result.directory / "config.yaml"
    config.write_text(config.read_text().replace("keep: 10", "keep: 2"))
    whet.resume(result.directory)
    assert {path.name for path in (result.directory / "checkpoints").iterdir()} == {
        "step-000003",
        "step-000004",
    }


def test_set_aside_later_rows_keeps_rows_up_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": null}\n{"step": 2}\n{"step": 3}\n{"st')
    move_superseded_rows(path, step=2, evaluated_step=None)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert path.with_suffix(".superseded.jsonl").read_text() == '{"step": null}\n{"step": 3}\n{"st\n'


def test_prune_ignores_other_directories(tmp_path):
    for name in ("step-000001", "step-000002", "step-²", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    prune_checkpoints(tmp_path, keep=1, best_steps=[])
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-000002", "step-²", "notes"}
