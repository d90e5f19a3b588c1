"""What a run has left on disk, as far as it can be read: a torn row or a missing file hides nothing else."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from whet.config.load_config import parse_yaml
from whet.errors import CheckpointError
from whet.run_directory import (
    CLASSIFICATION_FILE,
    CONFIG_FILE,
    FINAL,
    METRICS_FILE,
    PLAN_FILE,
    PROVENANCE_FILE,
    SAMPLES_FILE,
)

_LARGEST_STEP = 2**53

Values = dict[str, Any]  # Any: JSON values, of any kind until they are looked at


@dataclass
class RunFiles:
    """The files of a run, and what is wrong with them."""

    directory: Path
    config_text: str = ""
    config: Values = field(default_factory=dict)
    rows: list[Values] = field(default_factory=list)  # with a step, in the order they were written
    summary: Values | None = None
    provenance: Values = field(default_factory=dict)
    classification: Values | None = None
    samples: list[Values] = field(default_factory=list)
    plan: Values = field(default_factory=dict)  # what it was expected to take
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As the config says, or as its directory is called."""
        given = section(self.config, "run").get("name")
        return given if isinstance(given, str) and given else self.directory.resolve().name

    @property
    def finished(self) -> bool:
        """Whether it has left its result and its summary."""
        return self.summary is not None and (self.directory / FINAL).is_dir()

    @property
    def status(self) -> str:
        """In a few words."""
        if self.summary is None:
            return "not finished"
        reason = str(self.summary.get("stopped_because", "finished"))
        if not self.finished:
            return "stopped" if reason == "finished" else f"stopped: {reason}"
        return reason if reason == "finished" else f"finished: {reason}"


def is_run(directory: Path) -> bool:
    """Whether a run was begun there."""
    return (directory / CONFIG_FILE).is_file() or (directory / METRICS_FILE).is_file()


def read_run(directory: Path) -> RunFiles:
    """Everything that can be read of a run; a CheckpointError where there is none."""
    if not directory.is_dir():
        what = "is a file, not a run's directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}", hint="whet runs lists the runs that are there")
    if not is_run(directory):
        raise CheckpointError(
            f"{directory} is not a run: it has no {CONFIG_FILE}",
            hint="whet runs lists the runs that are there",
        )
    run = RunFiles(directory)
    _read_config(run)
    _read_metrics(run)
    run.provenance = _read_object(run, PROVENANCE_FILE) or {}
    run.classification = _read_object(run, CLASSIFICATION_FILE)
    run.samples = _read_rows(run, SAMPLES_FILE)
    run.plan = _read_object(run, PLAN_FILE) or {}
    return run


def section(values: Mapping[str, Any], name: str) -> Values:  # Any: JSON values
    """A part that should be an object, or an empty one."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _read_config(run: RunFiles) -> None:
    run.config_text = _read_text(run, CONFIG_FILE)
    if not run.config_text:
        run.problems.append(f"{CONFIG_FILE} is missing or empty")
        return
    try:
        found = parse_yaml(run.config_text)
    except yaml.YAMLError:
        found = None
    if isinstance(found, dict):
        run.config = found
    else:
        run.problems.append(f"{CONFIG_FILE} is no valid config")


def _read_metrics(run: RunFiles) -> None:
    rows = _read_rows(run, METRICS_FILE)
    run.rows = [row for row in rows if is_step(row.get("step"))]
    # only as the last row: whatever comes after it was written by a run that went on
    last = rows[-1].get("summary") if rows else None
    run.summary = last if isinstance(last, dict) else None
    if not rows:
        run.problems.append(f"{METRICS_FILE} has no rows")


def is_step(value: object) -> bool:
    """Whether it can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP


def _read_rows(run: RunFiles, name: str) -> list[Values]:
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


def _read_object(run: RunFiles, name: str) -> Values | None:
    text = _read_text(run, name)
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    run.problems.append(f"{name} is not a JSON object")
    return None


def _read_text(run: RunFiles, name: str) -> str:
    """A file's text; empty where there is none."""
    try:
        return (run.directory / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
        return ""
