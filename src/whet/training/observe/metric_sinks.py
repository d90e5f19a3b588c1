"""Sinks: send the metrics rows of a run to an experiment tracker.

Each sink has its own thread, so that it can neither stop nor slow the run. A failed call is retried. Rows
that a sink does not accept are written to a file in the run directory.
"""

import contextlib
import functools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whet.config.load_config import to_dict
from whet.errors import StorageError
from whet.storage import append_text
from whet.training.callbacks import Metrics, RowCallback, RunView

if TYPE_CHECKING:
    from whet.training.state import RunResult

log = logging.getLogger("whet")

_MAX_QUEUED_ROWS = 1000
_CLOSE_TIMEOUT_S = 30.0  # for rows that are still queued when the run ends
_RETRY_DELAYS_S = (0.5, 2.0, 8.0)


@dataclass(frozen=True)
class RunInfo:
    """Description of a run, which a sink gets before the first row."""

    name: str
    project: str  # name of the parent of the run directory
    directory: Path
    config: dict[str, Any]  # Any: JSON values
    step: int  # step that the run starts or resumes from
    identity: str | None  # the sink's id of this run, if it is resumed


class Sink(Protocol):
    """Interface to an experiment tracker, called from one thread; a call that raises is retried."""

    def start(self, run: RunInfo) -> str | None:
        """Open the run, and return an id to find it by when it is resumed."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one row."""

    def finish(self) -> None:
        """Close the run, which has ended or will be resumed later."""


@dataclass(frozen=True)
class _Row:
    step: int
    metrics: Metrics


class SinkCallback(RowCallback):
    """Sends metrics rows to a sink in a background thread."""

    state_key = "sink"

    def __init__(
        self, name: str, sink: Sink, *, every: int = 1, close_timeout_s: float = _CLOSE_TIMEOUT_S
    ) -> None:
        super().__init__(every)
        self.name = name
        self.sink = sink
        self.close_timeout_s = close_timeout_s
        self.identity: str | None = None
        self.path: Path | None = None  # file for rows that the sink did not accept
        self._rows: queue.Queue[_Row | None] = queue.Queue(_MAX_QUEUED_ROWS)  # None: the end
        self._current: _Row | None = None  # the row being written
        self._file_lock = threading.Lock()
        self._closing = threading.Event()
        self._failed = self._queue_full = False
        self._thread: threading.Thread | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Start the thread, which opens the sink."""
        super().on_train_begin(run)
        config = run.config
        directory = run.directory or (Path() if config is None else config.directory)
        info = RunInfo(
            name=directory.resolve().name if config is None else config.run.name,
            project=directory.resolve().parent.name,
            directory=directory,
            config={} if config is None else to_dict(config),
            step=run.step,
            identity=self.identity,
        )
        self.path = directory / f"sink-{self.name}.jsonl"
        self._closing.clear()
        self._failed = False
        self._thread = threading.Thread(
            target=self._run_sink, args=(info,), name=f"whet-{self.name}", daemon=True
        )
        self._thread.start()

    def on_train_end(self, result: "RunResult") -> None:
        """Queue the test metrics, and close the sink."""
        super().on_train_end(result)
        if (test := result.summary.get("test")) is not None:
            self.write_row(result.steps, {f"test_{name}": value for name, value in test.items()})
        self.close()

    def close(self) -> None:
        """Wait for the queued rows up to a timeout; the remaining ones are written to the file."""
        if self._thread is None:
            return
        self._closing.set()
        deadline = time.monotonic() + self.close_timeout_s
        with contextlib.suppress(queue.Full):  # the sink hangs, and is abandoned below
            self._rows.put(None, timeout=self.close_timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._abandon()
        self._thread = None

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the sums since the last row, and the sink's id of this run."""
        identity = {} if self.identity is None else {"sink": self.name, "identity": self.identity}
        return super().state() | identity

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore the sums, and the id if the sink is the same."""
        super().restore(state)
        if state.get("sink") == self.name:
            self.identity = state["identity"]

    def write_row(self, step: int, metrics: Metrics) -> None:
        """Queue a row."""
        row = _Row(step, dict(metrics))
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._queue_full:
                self._queue_full = True
                log.warning(
                    "the queue of sink %s is full (%d rows): further rows are written to %s",
                    *(self.name, _MAX_QUEUED_ROWS, self.path),
                )
            self._write_to_file(row)

    def _run_sink(self, info: RunInfo) -> None:
        self._call_with_retries(lambda: self._start(info))
        while (row := self._rows.get()) is not None:
            self._current = row
            if not self._call_with_retries(functools.partial(self._write, row)):
                self._write_to_file(row)
            self._current = None
        self._call_with_retries(self._finish)

    def _start(self, info: RunInfo) -> None:
        self.identity = self.sink.start(info)

    def _write(self, row: _Row) -> None:
        self.sink.write(row.step, dict(flatten_metrics(row.metrics)))

    def _finish(self) -> None:
        self.sink.finish()

    def _call_with_retries(self, call: Callable[[], None]) -> bool:
        """Call the sink, with retries unless it has failed before; return whether the call succeeded."""
        delays = iter(_RETRY_DELAYS_S)
        while not self._failed:
            try:
                call()
            except BaseException as error:  # some libraries raise SystemExit
                delay = next(delays, None) if isinstance(error, Exception) else None
                if delay is None:
                    self._disable(error)
                else:
                    self._closing.wait(delay)  # returns at once after the run has ended
            else:
                return True
        return False

    def _disable(self, error: BaseException) -> None:
        self._failed = True
        reason = (str(error).strip().splitlines() or [""])[0]
        log.warning(
            "sink %s failed: %s: %s; its rows are written to %s instead",
            *(self.name, type(error).__name__, reason, self.path),
        )
        with contextlib.suppress(BaseException):
            self.sink.finish()

    def _abandon(self) -> None:
        """Stop waiting for a sink that hangs, and write its queued rows to the file."""
        self._failed = True
        log.warning(
            "sink %s did not finish within %g s after the run: its remaining rows are in %s",
            *(self.name, self.close_timeout_s, self.path),
        )
        rows = [] if self._current is None else [self._current]
        with contextlib.suppress(queue.Empty):
            while True:
                rows += [row for row in [self._rows.get_nowait()] if row is not None]
        self._rows.put_nowait(None)
        for row in rows:
            self._write_to_file(row)

    def _write_to_file(self, row: _Row) -> None:
        """Write a row to the file; write errors are ignored, so that a full disk does not stop the run."""
        assert self.path is not None
        line = json.dumps({"step": row.step, **dict(flatten_metrics(row.metrics))})
        with self._file_lock, contextlib.suppress(OSError, StorageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_text(self.path, line + "\n")


def flatten_metrics(metrics: Metrics, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a row with their names; entries of lists and dictionaries are named `name/key`."""
    for name, value in metrics.items():
        if isinstance(value, bool | int | float):
            yield f"{prefix}{name}", float(value)
        elif isinstance(value, list | tuple):
            yield from flatten_metrics(
                {str(index): item for index, item in enumerate(value)}, f"{prefix}{name}/"
            )
        elif isinstance(value, dict):
            yield from flatten_metrics(value, f"{prefix}{name}/")
