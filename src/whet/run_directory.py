"""File names of a run directory, and reading the rows of metrics.jsonl and samples.jsonl."""

import json
import logging
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from whet.storage import append_text, fsync_file, read_json, replace_text

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
EVALUATIONS_FILE = "evaluations.jsonl"  # results of benchmark tasks, one per line
REPORT_PAGE = "report.html"
CHECKPOINTS_DIRECTORY = "checkpoints"
STATE_FILE = "state.json"  # in a checkpoint
FINAL_DIRECTORY = "final"  # the trained model or adapter
CARD_FILE = "README.md"  # the model card, in final/ and in exports
TOKENIZER_DIRECTORY = "tokenizer"  # a tokenizer trained for this run
BASE_DIRECTORY = "base"  # base weights of the adapter, if they exist nowhere else


def run_directory_of(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint, from its path."""
    return checkpoint.absolute().parent.parent


def is_finished(directory: Path) -> bool:
    """Return whether a run has finished, with a final model and a summary."""
    return (directory / FINAL_DIRECTORY).is_dir() and "summary" in _last_row(directory)


def read_summary(directory: Path) -> dict[str, Any]:  # Any: JSON values
    """Return the summary of a finished run."""
    summary: dict[str, Any] = _last_row(directory)["summary"]
    return summary


def count_logged_steps(path: Path) -> int:
    """Return the number of different steps in a metrics file."""
    return len({step for row in map(parse_row, split_rows(read_rows_text(path))) if (step := step_of(row))})


def move_superseded_rows(path: Path, *, step: int, evaluated_step: int | None) -> None:
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
    for line in split_rows(text):
        row = parse_row(line)
        number = step_of(row)
        repeated = number == step and "eval_s" in row and evaluated_step != step
        (superseded if number is None or number > step or repeated else retained).append(f"{line}\n")
    if superseded:
        superseded_path = path.with_suffix(".superseded.jsonl")
        append_text(superseded_path, "".join(superseded))
        fsync_file(superseded_path)
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


def split_rows(text: str) -> list[str]:
    """Split text at newlines only: `str.splitlines` would also split rows that contain U+2028."""
    return [line for line in text.split("\n") if line]


def parse_row(line: str) -> dict[str, Any]:  # Any: JSON values
    """Parse a row; return an empty dict if the line is incomplete or not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def start_date(directory: Path) -> date:
    """Return the date on which a run was started, or today if it has not started."""
    path = directory / PROVENANCE_FILE
    began = read_json(path).get("began") if path.is_file() else None
    try:
        return date.fromisoformat(str(began))
    except ValueError:
        return date.today()
