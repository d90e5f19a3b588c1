"""Stop a run on Ctrl-C, SIGTERM or a closed terminal: finish the step and save; a second signal kills it."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from whet.parallel.launch import catch_stop_signals
from whet.training.callbacks import Callback, Metrics, RunView, StopRun

log = logging.getLogger("whet")


class StopOnSignal(Callback):
    """A callback that stops the run with a checkpoint after it has received a signal.

    Before training starts there is nothing to save, and a signal raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._is_training = False
        self._previous_handlers: dict[int, Any] = {}  # Any: as signal.signal returns them

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._previous_handlers = catch_stop_signals(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self.received is not None and not self._is_training and isinstance(error, Exception):
            # some libraries turn KeyboardInterrupt into their own error
            raise KeyboardInterrupt(self._nothing_to_save()) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_repeated = self.received is not None
        self.received = signal.Signals(number).name
        if not self._is_training:
            raise KeyboardInterrupt(self._nothing_to_save())
        if is_repeated:
            raise KeyboardInterrupt(
                f"second signal ({self.received}): stopped at once; existing checkpoints are unchanged"
            )
        log.warning("%s: finishing this step, then saving; a second signal stops at once", self.received)

    def _nothing_to_save(self) -> str:
        return f"{self.received}: stopped before the first step, so there is nothing to save"

    def on_train_begin(self, run: RunView) -> None:
        """From now on, let a signal wait for the end of the step and a checkpoint."""
        self._is_training = True

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after the step during which the signal arrived."""
        return (
            None if self.received is None else StopRun(f"{self.received} after step {step}", unfinished=True)
        )

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after the evaluation during which the signal arrived."""
        return self.on_step_end(step, metrics)

    def on_pause(self) -> StopRun | None:
        """Interrupt an evaluation, which a resumed run repeats."""
        return (
            None
            if self.received is None
            else StopRun(f"{self.received} during an evaluation", unfinished=True)
        )
