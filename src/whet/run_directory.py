"""The files of a run directory: their names, and the rows of metrics.jsonl and samples.jsonl."""

import json
import logging
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from whet.storage import append_text, read_json, replace_text, sync_file

log = logging.getLogger("whet")

# files and directories of a run; no other module spells their names
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
PROVENANCE_FILE = "provenance.json"
ARCH_FILE = "arch.json"  # the fingerprint and the architecture of the model
LOG_FILE = "log.txt"
HELD_OUT_FILE = "held_out.json"  # the training records that a classifier is validated on
PLAN_FILE = "plan.json"
PROBE_FILE = "probe.json"
CLASSIFICATION_FILE = "classification.json"
CLASSIFICATION_PLOT = "classification.png"
REPORT_PAGE = "report.html"
CHECKPOINTS = "checkpoints"
STATE_FILE = "state.json"  # in a checkpoint
FINAL = "final"  # the trained model or adapter
TOKENIZER = "tokenizer"  # one that was trained for this run
BASE = "base"  # the weights its adapter was trained on, where nobody else has them


def run_of(checkpoint: Path) -> Path:
    """Return the run that a checkpoint belongs to, by where it is."""
    return checkpoint.absolute().parent.parent


def is_finished(directory: Path) -> bool:
    """Whether a run has left its result and its summary."""
    return (directory / FINAL).is_dir() and "summary" in _last_row(directory)


def summary_of(directory: Path) -> dict[str, Any]:  # Any: JSON values
    """The summary that a finished run ends with."""
    found: dict[str, Any] = _last_row(directory)["summary"]
    return found


def steps_with_rows(path: Path) -> int:
    """How many steps have left a row."""
    return len({step for row in map(parse_row, row_lines(read_rows_text(path))) if (step := step_of(row))})


def set_aside_later_rows(path: Path, *, step: int, evaluated_step: int | None) -> None:
    """Keep each step once: rows after the checkpoint go to a file beside, none is thrown away.

    So does an evaluation of the checkpoint's own step that the checkpoint knows nothing of: it comes again.
    So does what is not a row of a step.
    """
    kept: list[str] = []
    later: list[str] = []
    text = read_rows_text(path)
    for line in row_lines(text):
        row = parse_row(line)
        number = step_of(row)
        again = number == step and "eval_s" in row and evaluated_step != step
        (later if number is None or number > step or again else kept).append(f"{line}\n")
    if later:
        aside = path.with_suffix(".superseded.jsonl")
        append_text(aside, "".join(later))
        sync_file(aside)
    if text != (whole := "".join(kept)):
        replace_text(path, whole)


def step_of(row: Mapping[str, Any]) -> int | None:  # Any: JSON values
    """Return the step of a row; None where it has none."""
    step = row.get("step")
    return step if type(step) is int and step >= 0 else None


def _last_row(directory: Path) -> dict[str, Any]:  # Any: JSON values
    return parse_row(read_rows_text(directory / METRICS_FILE).rstrip("\n").rpartition("\n")[2])


def read_rows_text(path: Path) -> str:
    """Return the text of a file of rows; empty where there is none."""
    return path.read_text(errors="replace") if path.is_file() else ""


def row_lines(text: str) -> list[str]:
    """Rows end with a newline alone: `str.splitlines` would tear those whose texts hold U+2028, say."""
    return [line for line in text.split("\n") if line]


def parse_row(line: str) -> dict[str, Any]:  # Any: JSON values
    """What a line holds: nothing, where a crash has torn it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def began_on(directory: Path) -> date:
    """The day on which a run began: today, where it has not begun yet."""
    path = directory / PROVENANCE_FILE
    found = read_json(path).get("began") if path.is_file() else None
    try:
        return date.fromisoformat(str(found))
    except ValueError:
        return date.today()
