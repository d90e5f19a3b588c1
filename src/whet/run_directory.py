"""File names of a run directory, and reading the rows of metrics.jsonl and samples.jsonl."""

import json
import logging
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from whet.storage import append_text, read_json, replace_text, sync_file

log = logging.getLogger("whet")

# names of the files and directories of a run; other modules use these constants
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
PROVENANCE_FILE = "provenance.json"
ARCH_FILE = "arch.json"  # architecture and fingerprint of the model
LOG_FILE = "log.txt"
HELD_OUT_FILE = "held_out.json"  # training records that a classifier holds out for validation
PLAN_FILE = "plan.json"
PROBE_FILE = "probe.json"
CLASSIFICATION_FILE = "classification.json"
CLASSIFICATION_PLOT = "classification.png"
REPORT_PAGE = "report.html"
CHECKPOINTS = "checkpoints"
STATE_FILE = "state.json"  # in a checkpoint
FINAL = "final"  # the trained model or adapter
TOKENIZER = "tokenizer"  # a tokenizer trained for this run
BASE = "base"  # base weights of the adapter, if they exist nowhere else


def run_of(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint, from its path."""
    return checkpoint.absolute().parent.parent


def is_finished(directory: Path) -> bool:
    """Return whether a run has finished, with a final model and a summary."""
    return (directory / FINAL).is_dir() and "summary" in _last_row(directory)


def summary_of(directory: Path) -> dict[str, Any]:  # Any: JSON values
    """Return the summary of a finished run."""
    summary: dict[str, Any] = _last_row(directory)["summary"]
    return summary


def steps_with_rows(path: Path) -> int:
    """Return the number of different steps in a metrics file."""
    return len({step for row in map(parse_row, row_lines(read_rows_text(path))) if (step := step_of(row))})


def set_aside_later_rows(path: Path, *, step: int, evaluated_step: int | None) -> None:
    """Move the rows after a checkpoint to `*.superseded.jsonl`, because the resumed run writes them again.

    This includes rows without a step, and an evaluation at the checkpoint's step that it does not contain.

    Args:
        path: The file of rows.
        step: The step of the checkpoint.
        evaluated_step: The step of the last evaluation, according to the checkpoint.
    """
    retained: list[str] = []
    superseded: list[str] = []
    text = read_rows_text(path)
    for line in row_lines(text):
        row = parse_row(line)
        number = step_of(row)
        repeated = number == step and "eval_s" in row and evaluated_step != step
        (superseded if number is None or number > step or repeated else retained).append(f"{line}\n")
    if superseded:
        superseded_path = path.with_suffix(".superseded.jsonl")
        append_text(superseded_path, "".join(superseded))
        sync_file(superseded_path)
    if text != (new_text := "".join(retained)):
        replace_text(path, new_text)


def step_of(row: Mapping[str, Any]) -> int | None:  # Any: JSON values
    """Return the step of a row, or None if it has no valid step."""
    step = row.get("step")
    return step if type(step) is int and step >= 0 else None


def _last_row(directory: Path) -> dict[str, Any]:  # Any: JSON values
    return parse_row(read_rows_text(directory / METRICS_FILE).rstrip("\n").rpartition("\n")[2])


def read_rows_text(path: Path) -> str:
    """Return the text of a JSON Lines file, or an empty string if it does not exist."""
    return path.read_text(errors="replace") if path.is_file() else ""


def row_lines(text: str) -> list[str]:
    """Split text at newlines only: `str.splitlines` would also split rows that contain U+2028."""
    return [line for line in text.split("\n") if line]


def parse_row(line: str) -> dict[str, Any]:  # Any: JSON values
    """Parse a row; return an empty dict if the line is incomplete or not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def began_on(directory: Path) -> date:
    """Return the date on which a run was started, or today if it has not started."""
    path = directory / PROVENANCE_FILE
    began = read_json(path).get("began") if path.is_file() else None
    try:
        return date.fromisoformat(str(began))
    except ValueError:
        return date.today()
