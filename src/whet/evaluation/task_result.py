"""The result of a benchmark task, and the file of a run that stores its results."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from whet.run_directory import EVALUATIONS_FILE, parse_row, read_rows_text, split_rows
from whet.storage import append_text


@dataclass(frozen=True)
class Score:
    """One metric of a task."""

    value: float
    stderr: float | None  # None: the harness computes none for this metric
    higher_is_better: bool = True


@dataclass(frozen=True)
class Contamination:
    """How many items of a task overlap with training data."""

    ngram: int  # words
    overlapping: int  # items
    items: int
    clean_scores: dict[str, float]  # metrics over the other items, for metrics that are means over the items


@dataclass(frozen=True)
class TaskResult:
    """The metrics of a model on one task or group of tasks, and the score of each item."""

    key: str  # a hash of everything that the scores depend on
    task: str
    version: str
    shots: int
    items: int  # the number of evaluated items
    limit: int | None
    chat: bool
    scores: dict[str, Score]
    item_ids: list[str] = field(default_factory=list)
    item_scores: dict[str, list[float]] = field(default_factory=dict)  # metrics that are means over the items
    date: str = ""  # of the evaluation, UTC
    contamination: Contamination | None = None  # None: not computed
    tasks: list[str] = field(default_factory=list)  # of a group
    step: int | None = None  # of the run that trained the model; None: evaluated after the run

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the result as a JSON object."""
        return asdict(self)


def parse_results(rows: Iterable[Mapping[str, Any]]) -> list[TaskResult]:  # Any: JSON values
    """Return the results that JSON objects describe; incomplete ones are left out."""
    adapter = TypeAdapter(TaskResult)
    results = []
    for row in rows:
        try:
            results.append(adapter.validate_python(row))
        except ValidationError:
            continue
    return results


def read_results(directory: Path) -> list[TaskResult]:
    """Return the results stored in a run, oldest first; damaged rows are left out."""
    return parse_results(map(parse_row, split_rows(read_rows_text(directory / EVALUATIONS_FILE))))


def append_result(directory: Path, result: TaskResult) -> None:
    """Append a result to the stored results of a run."""
    append_text(directory / EVALUATIONS_FILE, json.dumps(result.to_json()) + "\n")
