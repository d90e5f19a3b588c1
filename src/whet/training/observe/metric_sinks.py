"""Rows of a run, sent elsewhere as well: by a thread of its own, so that no sink can stop or slow the run.

A call that fails is tried again; rows that a sink did not take go to a file in the run's directory.
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

_ROWS = 1000  # that may wait
_LAST_S = 30.0  # for what still waits when the run is over
_RETRY_S = (0.5, 2.0, 8.0)  # waits of the sink's thread before it tries a call again


@dataclass(frozen=True)
class RunFacts:
    """What a sink is told of a run before its first row."""

    name: str
    project: str  # the directory that the run's directory is in
    directory: Path
    config: dict[str, Any]  # Any: JSON values
    step: int  # rows come after this one
    identity: str | None  # what the sink called an earlier part of this run


class Sink(Protocol):
    """Somewhere rows go. Called on one thread; a call that raises is repeated before the sink is given up."""

    def start(self, run: RunFacts) -> str | None:
        """Open, and say by what this run can be found again when it is resumed."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Take a row."""

    def finish(self) -> None:
        """Close; the run is over, or goes on another time."""


@dataclass(frozen=True)
class _Row:
    step: int
    metrics: Metrics


class SinkCallback(RowCallback):
    """Hands rows to a sink."""

    state_key = "sink"

    def __init__(self, name: str, sink: Sink, *, every: int = 1, last_s: float = _LAST_S) -> None:
        super().__init__(every)
        self.name = name
        self.sink = sink
        self.last_s = last_s
        self.identity: str | None = None
        self.path: Path | None = None  # of the rows that the sink did not take
        self._rows: queue.Queue[_Row | None] = queue.Queue(_ROWS)  # None: there are no more
        self._current: _Row | None = None  # the one being handed over
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._failed = self._behind = False
        self._thread: threading.Thread | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Open it, in the background."""
        super().on_train_begin(run)
        config = run.config
        directory = run.directory or (Path() if config is None else config.directory)
        facts = RunFacts(
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
            target=self._work, args=(facts,), name=f"whet-{self.name}", daemon=True
        )
        self._thread.start()

    def on_train_end(self, result: "RunResult") -> None:
        """Queue the test numbers, close it, and wait a little."""
        super().on_train_end(result)
        if (test := result.summary.get("test")) is not None:
            self.take(result.steps, {f"test_{name}": value for name, value in test.items()})
        self.close()

    def close(self) -> None:
        """Let it finish what it has, for a while; what it did not take by then goes to the file."""
        if self._thread is None:
            return
        self._closing.set()
        deadline = time.monotonic() + self.last_s
        with contextlib.suppress(queue.Full):  # then it hangs, and is left below
            self._rows.put(None, timeout=self.last_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._leave()
        self._thread = None

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """The steps since the last row, and by what the sink knows this run."""
        known = {} if self.identity is None else {"sink": self.name, "identity": self.identity}
        return super().state() | known

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Continue the row; under the same name, if it is the same sink."""
        super().restore(state)
        if state.get("sink") == self.name:
            self.identity = state["identity"]

    def take(self, step: int, metrics: Metrics) -> None:
        """Queue a row."""
        row = _Row(step, dict(metrics))
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._behind:
                self._behind = True
                log.warning(
                    "the sink %s is %d rows behind: the next ones go to %s", self.name, _ROWS, self.path
                )
            self._keep(row)

    def _work(self, facts: RunFacts) -> None:
        self._attempt(lambda: self._start(facts))
        while (row := self._rows.get()) is not None:
            self._current = row
            if not self._attempt(functools.partial(self._write, row)):
                self._keep(row)
            self._current = None
        self._attempt(self._finish)

    def _start(self, facts: RunFacts) -> None:
        self.identity = self.sink.start(facts)

    def _write(self, row: _Row) -> None:
        self.sink.write(row.step, dict(flat_numbers(row.metrics)))

    def _finish(self) -> None:
        self.sink.finish()

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Call the sink, again where that fails, unless it has been given up; return whether it worked."""
        waits = iter(_RETRY_S)
        while not self._failed:
            try:
                call()
            except BaseException as error:  # some libraries want to exit the process
                wait = next(waits, None) if isinstance(error, Exception) else None
                if wait is None:
                    self._give_up(error)
                else:
                    self._closing.wait(wait)  # not at all once the run is over
            else:
                return True
        return False

    def _give_up(self, error: BaseException) -> None:
        self._failed = True
        reason = (str(error).strip().splitlines() or [""])[0]
        log.warning(
            "the sink %s failed: %s: %s; rows that it did not take go to %s",
            *(self.name, type(error).__name__, reason, self.path),
        )
        with contextlib.suppress(BaseException):
            self.sink.finish()

    def _leave(self) -> None:
        """Take from a sink that hangs what it was not given yet."""
        self._failed = True
        log.warning(
            "the sink %s was not done %g s after the run: the rest of its rows is in %s",
            *(self.name, self.last_s, self.path),
        )
        rows = [] if self._current is None else [self._current]
        with contextlib.suppress(queue.Empty):
            while True:
                rows += [row for row in [self._rows.get_nowait()] if row is not None]
        self._rows.put_nowait(None)
        for row in rows:
            self._keep(row)

    def _keep(self, row: _Row) -> None:
        """Write a row to the file; a disk that is full costs rows here, never the run."""
        assert self.path is not None
        line = json.dumps({"step": row.step, **dict(flat_numbers(row.metrics))})
        with self._writing, contextlib.suppress(OSError, StorageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_text(self.path, line + "\n")


def flat_numbers(metrics: Metrics, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a row under a name of its own: those of lists and mappings as name/place."""
    for name, value in metrics.items():
        if isinstance(value, bool | int | float):
            yield f"{prefix}{name}", float(value)
        elif isinstance(value, list | tuple):
            yield from flat_numbers(
                {str(place): item for place, item in enumerate(value)}, f"{prefix}{name}/"
            )
        elif isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{name}/")
