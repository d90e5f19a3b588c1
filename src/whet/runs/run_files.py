"""Read the files of a run directory, and report damaged or missing ones instead of failing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from whet.config.load_config import parse_yaml
from whet.errors import CheckpointError
from whet.evaluation.task_result import TaskResult, parse_results
from whet.run_directory import (
    CLASSIFICATION_FILE,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    FINAL_DIRECTORY,
    METRICS_FILE,
    PLAN_FILE,
    PROVENANCE_FILE,
    SAMPLES_FILE,
)

_LARGEST_STEP = 2**53

JsonObject = dict[str, Any]  # Any: JSON values that have not been validated


@dataclass
class RunFiles:
    """The parsed contents of a run directory, and the problems of its files."""

    directory: Path
    config_text: str = ""
    config: JsonObject = field(default_factory=dict)
    rows: list[JsonObject] = field(default_factory=list)  # those with a step, in file order
    summary: JsonObject | None = None
    provenance: JsonObject = field(default_factory=dict)
    classification: JsonObject | None = None
    samples: list[JsonObject] = field(default_factory=list)
    plan: JsonObject = field(default_factory=dict)  # the estimate from before the run
    evaluations: list[TaskResult] = field(default_factory=list)  # of benchmark tasks, oldest first
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The value of run.name, or else the name of the directory."""
        name = nested_object(self.config, "run").get("name")
        return name if isinstance(name, str) and name else self.directory.resolve().name

    @property
    def is_finished(self) -> bool:
        """Whether the run has written `final/` and its summary."""
        return self.summary is not None and (self.directory / FINAL_DIRECTORY).is_dir()

    @property
    def status(self) -> str:
        """The state of the run in a few words: "finished", "not finished", "stopped: REASON" and so on."""
        if self.summary is None:
            return "not finished"
        reason = str(self.summary.get("stopped_because", "finished"))
        if not self.is_finished:
            return "stopped" if reason == "finished" else f"stopped: {reason}"
        return reason if reason == "finished" else f"finished: {reason}"


def is_run(directory: Path) -> bool:
    """Return whether a directory contains a run, finished or not."""
    return (directory / CONFIG_FILE).is_file() or (directory / METRICS_FILE).is_file()


def read_run(directory: Path) -> RunFiles:
    """Return everything that can be read from a run directory.

    Raises:
        CheckpointError: The directory does not exist, or is not a run directory.
    """
    if not directory.is_dir():
        problem = "is a file, not a run directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {problem}", hint="list the existing runs with: whet runs")
    if not is_run(directory):
        raise CheckpointError(
            f"{directory} is not a run: it has no {CONFIG_FILE}",
            hint="list the existing runs with: whet runs",
        )
    run = RunFiles(directory)
    _read_config(run)
    _read_metrics(run)
    run.provenance = _read_object(run, PROVENANCE_FILE) or {}
    run.classification = _read_object(run, CLASSIFICATION_FILE)
    run.samples = _read_rows(run, SAMPLES_FILE)
    run.plan = _read_object(run, PLAN_FILE) or {}
    _read_evaluations(run)
    return run


def nested_object(values: Mapping[str, Any], name: str) -> JsonObject:  # Any: JSON values
    """Return a nested object, or an empty one if the value is missing or not an object."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _read_config(run: RunFiles) -> None:
    run.config_text = _read_text(run, CONFIG_FILE)
    if not run.config_text:
        run.problems.append(f"{CONFIG_FILE} is missing or empty")
        return
    try:
        config = parse_yaml(run.config_text)
    except yaml.YAMLError:
        config = None
    if isinstance(config, dict):
        run.config = config
    else:
        run.problems.append(f"{CONFIG_FILE} is not a valid config")


def _read_metrics(run: RunFiles) -> None:
    rows = _read_rows(run, METRICS_FILE)
    run.rows = [row for row in rows if is_valid_step(row.get("step"))]
    # a summary counts only as the last row: later rows belong to a resumed run
    last = rows[-1].get("summary") if rows else None
    run.summary = last if isinstance(last, dict) else None
    if not rows:
        run.problems.append(f"{METRICS_FILE} has no rows")


def _read_evaluations(run: RunFiles) -> None:
    rows = _read_rows(run, EVALUATIONS_FILE)
    run.evaluations = parse_results(rows)
    if len(run.evaluations) < len(rows):
        damaged = len(rows) - len(run.evaluations)
        run.problems.append(f"{EVALUATIONS_FILE}: {damaged:,} of its rows are not complete results")


def is_valid_step(value: object) -> bool:
    """Return whether a value is a valid step: an integer of at least 0, and not absurdly large."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP


def _read_rows(run: RunFiles, name: str) -> list[JsonObject]:
    rows, broken = [], 0
    for line in _read_text(run, name).split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        run.problems.append(f"{name}: {broken:,} of its lines cannot be read and are left out")
    return rows


def _read_object(run: RunFiles, name: str) -> JsonObject | None:
    text = _read_text(run, name)
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    run.problems.append(f"{name} is not a JSON object")
    return None


def _read_text(run: RunFiles, name: str) -> str:
    """Return a file's text, or an empty string if the file does not exist or cannot be read."""
    try:
        return (run.directory / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
        return ""
