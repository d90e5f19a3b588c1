"""metrics.jsonl: one row per logged step and evaluation, and the summary."""

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import StorageError
from whet.storage import append_text, sync_file, sync_rows
from whet.training.callbacks import Metrics, RowCallback, plain

if TYPE_CHECKING:
    from whet.training.state import RunResult

log = logging.getLogger("whet")


class MetricsLogger(RowCallback):
    """Rows of metrics.jsonl, flushed one by one, and the summary."""

    state_key = "metrics-logger"

    def __init__(self, path: str | Path, every: int = 1) -> None:
        super().__init__(every)
        self.path = Path(path)
        self._waiting: list[str] = []  # rows that a full disk did not take

    def take(self, step: int, metrics: Metrics) -> None:
        """Append a row."""
        self._write({"step": step, **metrics})

    def on_train_end(self, result: "RunResult") -> None:
        """Append the summary; rows that are still not on disk are an error now."""
        super().on_train_end(result)
        sync_rows(self.path.parent)  # a summary says that everything before it is there
        self._waiting.append(_line({"summary": result.summary}))
        self._append_waiting()
        sync_file(self.path)

    def _write(self, row: Metrics) -> None:
        """Append a row, or keep it for the next time where the disk does not take it."""
        self._waiting.append(_line(row))
        try:
            self._append_waiting()
        except StorageError as error:
            if len(self._waiting) == 1:  # said once, however long it lasts
                log.warning("%s; its rows are kept and written later", error.message)

    def _append_waiting(self) -> None:
        append_text(self.path, "".join(self._waiting))
        self._waiting.clear()


def _line(row: Metrics) -> str:
    return json.dumps(_jsonable(plain(row))) + "\n"


def _jsonable(value: Any) -> Any:  # Any: JSON values
    """JSON has no NaN or infinity: they are written as their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list | tuple) else value
