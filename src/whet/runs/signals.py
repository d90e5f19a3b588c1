"""Ctrl-C, SIGTERM, a closed terminal: finish the step, save, say how to go on; a second one ends at once."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from whet.parallel.launch import catch_stop_signals
from whet.training.callbacks import Callback, Metrics, RunView, StopRun

log = logging.getLogger("whet")


class StopOnSignal(Callback):
    """A callback that asks the run to stop once a signal has come.

    Before the run has begun there is nothing to finish and nothing to save: the signal ends it at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._begun = False
        self._before: dict[int, Any] = {}  # Any: whatever handler was there

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = catch_stop_signals(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received is not None and not self._begun and isinstance(error, Exception):
            # some libraries turn an interruption into an error of their own
            raise KeyboardInterrupt(self._nothing_to_save()) from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number).name
        if not self._begun:
            raise KeyboardInterrupt(self._nothing_to_save())
        if again:
            raise KeyboardInterrupt(f"{self.received} again: ended at once; the checkpoints are as they were")
        log.warning("%s: finishing this step, then saving; once more ends at once", self.received)

    def _nothing_to_save(self) -> str:
        return f"{self.received}: stopped before the first step, so there is nothing to save"

    def on_train_begin(self, run: RunView) -> None:
        """From now on a step can be finished and saved."""
        self._begun = True

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after the step in which the signal came."""
        return (
            None if self.received is None else StopRun(f"{self.received} after step {step}", unfinished=True)
        )

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after an evaluation, too."""
        return self.on_step_end(step, metrics)

    def on_pause(self) -> StopRun | None:
        """Break off an evaluation: it is done again when the run is resumed."""
        return (
            None if self.received is None else StopRun(f"{self.received} in an evaluation", unfinished=True)
        )
