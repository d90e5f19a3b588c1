"""Rows of a run, sent elsewhere as well: by a thread of its own, so that no sink can stop or slow the run."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whet.config.load import to_dict
from whet.training.callbacks import Metrics, Rows

if TYPE_CHECKING:
    from whet.training.state import RunResult
    from whet.training.trainer import Trainer

log = logging.getLogger("whet")

_ROWS = 1000  # that may wait
_LAST_S = 30.0  # for what still waits when the run is over


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
    """Somewhere rows go. All is called on one thread; what it raises ends the sink, not the run."""

    def start(self, run: RunFacts) -> str | None:
        """Open, and say by what this run can be found again when it is resumed."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Take a row."""

    def finish(self) -> None:
        """Close; the run is over, or goes on another time."""


class SinkCallback(Rows):
    """Hands rows to a sink."""

    def __init__(self, name: str, sink: Sink, *, every: int = 1, last_s: float = _LAST_S) -> None:
        super().__init__(every)
        self.name = name
        self.sink = sink
        self.last_s = last_s
        self.identity: str | None = None
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(_ROWS)
        self._dropped = self._behind = False
        self._thread: threading.Thread | None = None

    def on_train_begin(self, run: "Trainer") -> None:
        """Open it, in the background."""
        super().on_train_begin(run)
        directory = run.directory or run.config.directory
        facts = RunFacts(
            name=run.config.run.name,
            project=directory.resolve().parent.name,
            directory=directory,
            config=to_dict(run.config),
            step=run.state.step,
            identity=self.identity,
        )
        self._put(lambda: self._start(facts))
        self._thread = threading.Thread(target=self._work, name=f"whet-{self.name}", daemon=True)
        self._thread.start()

    def on_train_end(self, result: "RunResult") -> None:
        """Queue the test numbers, close it, and wait a little."""
        super().on_train_end(result)
        if (test := result.summary.get("test")) is not None:
            self.take(result.steps, {f"test_{name}": value for name, value in test.items()})
        self.close()

    def close(self) -> None:
        """Let it finish what it has, for a while."""
        if self._thread is None:
            return
        self._put(self._finish)
        self._put(None)
        self._thread.join(self.last_s)
        if self._thread.is_alive() and not self._dropped:
            self._dropped = True
            log.warning("the sink %s was not done %g s after the run, and is left", self.name, self.last_s)
        self._thread = None

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """By what the sink knows this run."""
        known = {} if self.identity is None else {"sink": self.name, "identity": self.identity}
        return {**super().state(), **known}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Go on under the same name, if it is the same sink."""
        super().restore(state)
        if state.get("sink") == self.name:
            self.identity = state["identity"]

    def _start(self, facts: RunFacts) -> None:
        self.identity = self.sink.start(facts)

    def _finish(self) -> None:
        self.sink.finish()

    def take(self, step: int, metrics: Metrics) -> None:
        """Queue a row."""
        row = dict(metrics)
        self._put(lambda: self.sink.write(step, dict(flat_numbers(row))))

    def _put(self, task: Callable[[], None] | None) -> None:
        if self._dropped:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            if not self._behind:
                self._behind = True
                log.warning("the sink %s is %d rows behind: the next ones are left out", self.name, _ROWS)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._dropped:
                return
            try:
                task()
            except BaseException as error:  # a library that wants to exit the process is no exception
                self._dropped = True
                reason = (str(error).strip().splitlines() or [""])[0]
                log.warning("the sink %s is dropped: %s: %s", self.name, type(error).__name__, reason)
                with contextlib.suppress(BaseException):
                    self.sink.finish()
                return


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
