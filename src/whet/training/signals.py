"""Ctrl-C, SIGTERM, a closed terminal: finish the step, save, say how to go on; a second one ends at once."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from whet.training.callbacks import Callback, Metrics, StopRun

log = logging.getLogger("whet")


class StopOnSignal(Callback):
    """A callback that asks the run to stop once a signal has come."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}  # Any: whatever handler was there

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        log.warning("%s: finishing this step, then saving; once more ends at once", self.received)

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after the step in which the signal came."""
        return (
            None if self.received is None else StopRun(f"{self.received} after step {step}", unfinished=True)
        )

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after an evaluation, too."""
        return self.on_step_end(step, metrics)
