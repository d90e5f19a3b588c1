"""Logger for metrics.jsonl: one entry per logged step and evaluation, and the run summary."""

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import StorageError
from whet.storage import append_text, fsync_file, fsync_jsonl_files
from whet.training.callbacks import Metrics, RowCallback, to_python

if TYPE_CHECKING:
    from whet.training.state import RunResult

log = logging.getLogger("whet")


class MetricsLogger(RowCallback):
    """Writes metrics rows to a JSON Lines file, flushed one by one, and the run summary at the end.

    Args:
        path: The file to append to.
        every: Write a training row every this many steps; it aggregates the steps since the previous row.
    """

    state_key = "metrics-logger"

    def __init__(self, path: str | Path, every: int = 1) -> None:
        super().__init__(every)
        self.path = Path(path)
        self._pending: list[str] = []  # lines that could not be written yet

    def write_row(self, step: int, metrics: Metrics) -> None:
        """Append one row."""
        self._write({"step": step, **metrics})

    def on_train_end(self, result: "RunResult") -> None:
        """Append the summary; raises StorageError if pending rows still cannot be written."""
        super().on_train_end(result)
        fsync_jsonl_files(self.path.parent)  # a summary implies that all earlier rows are on disk
        self._pending.append(_line({"summary": result.summary}))
        self._append_pending()
        fsync_file(self.path)

    def _write(self, row: Metrics) -> None:
        """Append a row, or store it until the next write if the disk is full."""
        self._pending.append(_line(row))
        try:
            self._append_pending()
        except StorageError as error:
            if len(self._pending) == 1:  # log only the first of several failures in a row
                log.warning("%s; its rows are kept in memory and written later", error.message)

    def _append_pending(self) -> None:
        append_text(self.path, "".join(self._pending))
        self._pending.clear()


def _line(row: Metrics) -> str:
    return json.dumps(_jsonable(to_python(row))) + "\n"


def _jsonable(value: Any) -> Any:  # Any: JSON values
    """Replace NaN and infinity, which JSON does not have, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list | tuple) else value
