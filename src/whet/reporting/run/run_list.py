"""The list of runs in a directory, one line per run; unreadable values are shown as a question mark."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.data.inspect.token_text import to_visible_text
from whet.errors import ConfigError
from whet.reporting.formatting import format_age, format_file_size, format_value
from whet.reporting.run.run_facts import best_text
from whet.run_directory import CONFIG_FILE, METRICS_FILE
from whet.runs.metric_series import as_number
from whet.runs.run_files import JsonObject, RunFiles, is_run, nested_object

_UNKNOWN = "?"
_LAST_ROWS = 50  # metrics rows to search for the last loss, which evaluations and torn rows lack
_HEADINGS = ("name", "status", "step", "metric", "size", "age")


@dataclass(frozen=True)
class ListedRun:
    """One run of the list, with its values as text."""

    name: str
    status: str
    step: str
    metric: str
    size: int
    changed: float  # modification time of its metrics; 0: unknown

    def cells(self, now: float) -> tuple[str, ...]:
        """Return the cells of the run's table row; `now` is the time that ages refer to."""
        age = format_age(now - self.changed) if self.changed else _UNKNOWN
        cells = (self.name, self.status, self.step, self.metric, format_file_size(self.size), age)
        return tuple(map(to_visible_text, cells))


def list_runs(directory: Path) -> list[ListedRun]:
    """Return the runs in a directory, newest first; for the directory of a run, that run.

    The runs of a sweep or an ablation, which are one level deeper, are named SWEEP/RUN.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory", hint="name the directory of the runs (run.dir)")
    try:
        if is_run(directory):
            return [_list_run(directory)]
        children = _subdirectories(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from error
    runs = [run for child in children for run in _list_child(child)]
    return sorted(runs, key=lambda run: -run.changed)


def _list_child(directory: Path) -> list[ListedRun]:
    """Return a run, or the runs inside the directory of a sweep."""
    try:
        if is_run(directory):
            return [_list_run(directory)]
        children = _subdirectories(directory)
        return [_list_run(child, f"{directory.name}/") for child in children if is_run(child)]
    except OSError:  # not readable by this user
        return [_unreadable_run(directory)]


def _subdirectories(directory: Path) -> list[Path]:
    paths = sorted(directory.iterdir())
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]


def _unreadable_run(directory: Path, prefix: str = "") -> ListedRun:
    name = f"{prefix}{directory.name}"
    return ListedRun(name, _UNKNOWN, _UNKNOWN, _UNKNOWN, _total_size(directory), 0.0)


def _list_run(directory: Path, prefix: str = "") -> ListedRun:
    try:
        rows = _last_rows(directory / METRICS_FILE)
    except OSError:
        return _unreadable_run(directory, prefix)
    run = RunFiles(directory, rows=rows)
    summary = nested_object(rows[-1], "summary") if rows else {}
    if summary:
        run.summary = summary
    metrics = directory / METRICS_FILE
    is_damaged = not rows and metrics.is_file() and metrics.stat().st_size > 0
    return ListedRun(
        name=f"{prefix}{directory.resolve().name}",
        status=_UNKNOWN if is_damaged else run.status.partition(":")[0],  # the report has the full reason
        step=_step(rows, summary),
        metric=best_text(summary) or _last_loss(rows, summary),
        size=_total_size(directory),
        changed=_modification_time(directory),
    )


def _last_rows(path: Path) -> list[JsonObject]:
    """Return the valid rows among the last rows of a metrics file."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[-_LAST_ROWS:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _step(rows: Sequence[JsonObject], summary: JsonObject) -> str:
    steps = [summary.get("steps"), *(row.get("step") for row in reversed(rows))]
    known = next((step for step in steps if as_number(step) is not None), None)
    return format_value(known, missing=_UNKNOWN)


def _last_loss(rows: Sequence[JsonObject], summary: JsonObject) -> str:
    for row in (nested_object(summary, "final"), *reversed(rows)):
        for name in ("eval_loss", "loss"):
            if as_number(row.get(name)) is not None:
                return f"{name.replace('_', ' ')} {format_value(row[name])}"
    return _UNKNOWN


def _modification_time(directory: Path) -> float:
    for name in (METRICS_FILE, CONFIG_FILE):
        try:
            return (directory / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _total_size(directory: Path) -> int:
    """Return the bytes of all files, without following links; files that vanish meanwhile are skipped."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total


def runs_text(runs: Sequence[ListedRun], now: float) -> str:
    """Return the list of runs as a table; `now` is the time that ages refer to."""
    rows = [_HEADINGS, *(run.cells(now) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    right_aligned = {"step", "size", "age"}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if heading in right_aligned else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ).rstrip()
        for row in rows
    )
