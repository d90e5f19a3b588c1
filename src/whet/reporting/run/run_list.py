"""The runs of a directory, a line each; what cannot be read of one is a question mark."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.data.inspect.token_text import visible
from whet.errors import ConfigError
from whet.reporting.formatting import format_age, format_file_size, format_value
from whet.reporting.run.run_facts import best_text
from whet.run_directory import CONFIG_FILE, METRICS_FILE
from whet.runs.metric_series import as_number
from whet.runs.run_files import RunFiles, Values, is_run, section

_UNKNOWN = "?"
_LAST_ROWS = 50  # looked at for the last loss: evaluations and torn rows have none
_HEADINGS = ("name", "status", "step", "metric", "size", "age")


@dataclass(frozen=True)
class ListedRun:
    """One line."""

    name: str
    status: str
    step: str
    metric: str
    size: int
    changed: float  # when its metrics were last written, as the file system counts

    def cells(self, now: float) -> tuple[str, ...]:
        """As they are shown."""
        age = format_age(now - self.changed) if self.changed else _UNKNOWN
        shown = (self.name, self.status, self.step, self.metric, format_file_size(self.size), age)
        return tuple(map(visible, shown))


def list_runs(directory: Path) -> list[ListedRun]:
    """The runs in a directory, the newest first; of a run's own directory, that one."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory", hint="name the one that runs are kept in (run.dir)")
    try:
        places = [directory] if is_run(directory) else sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from error
    found = [_listed(place) for place in places if place.is_dir() and not place.name.startswith(".")]
    return sorted((run for run in found if run is not None), key=lambda run: -run.changed)


def _listed(place: Path) -> ListedRun | None:
    try:
        if not is_run(place):
            return None
        rows = _last_rows(place / METRICS_FILE)
    except OSError:  # not ours to read: still there
        return ListedRun(place.name, _UNKNOWN, _UNKNOWN, _UNKNOWN, _bytes_in(place), 0.0)
    run = RunFiles(place, rows=rows)
    last = section(rows[-1], "summary") if rows else {}
    if last:
        run.summary = last
    broken = not rows and (place / METRICS_FILE).is_file() and (place / METRICS_FILE).stat().st_size > 0
    return ListedRun(
        name=place.resolve().name,
        status=_UNKNOWN if broken else run.status.partition(":")[0],  # why it stopped is in the report
        step=_step(rows, last),
        metric=best_text(last) or _last_loss(rows, last),
        size=_bytes_in(place),
        changed=_changed(place),
    )


def _last_rows(path: Path) -> list[Values]:
    """The last rows that can be read."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[-_LAST_ROWS:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def _step(rows: Sequence[Values], summary: Values) -> str:
    steps = [summary.get("steps"), *(row.get("step") for row in reversed(rows))]
    known = next((step for step in steps if as_number(step) is not None), None)
    return format_value(known, missing=_UNKNOWN)


def _last_loss(rows: Sequence[Values], summary: Values) -> str:
    for row in (section(summary, "final"), *reversed(rows)):
        for name in ("eval_loss", "loss"):
            if as_number(row.get(name)) is not None:
                return f"{name.replace('_', ' ')} {format_value(row[name])}"
    return _UNKNOWN


def _changed(place: Path) -> float:
    for name in (METRICS_FILE, CONFIG_FILE):
        try:
            return (place / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _bytes_in(place: Path) -> int:
    """Of the files themselves, not of what links point at; those that vanish meanwhile count nothing."""
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total


def runs_text(runs: Sequence[ListedRun], now: float) -> str:
    """The runs as a table."""
    rows = [_HEADINGS, *(run.cells(now) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    numbers = {"step", "size", "age"}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if heading in numbers else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ).rstrip()
        for row in rows
    )
