"""The list of a run's callbacks: calls their hooks, agrees on stopping across ranks, saves their states."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.parallel.process_group import World
from whet.training.callbacks import (
    Callback,
    EvaluationStoppedError,
    Injector,
    Metrics,
    ModelCallback,
    StopRun,
    to_python,
    upgrade_state_names,
    with_state_names,
)

if TYPE_CHECKING:
    from whet.training.state import RunResult
    from whet.training.trainer import Trainer

log = logging.getLogger("whet")


class CallbackList:
    """Calls the hooks of callbacks, injectors first, and stores the first StopRun that one returns."""

    def __init__(self, callbacks: Iterable[Callback], world: World) -> None:
        on_this_rank = [callback for callback in callbacks if world.is_main or not callback.main_only]
        self.callbacks = sorted(on_this_rank, key=lambda callback: not isinstance(callback, Injector))
        self.world = world
        self.stop: StopRun | None = None

    def train_begin(self, trainer: "Trainer") -> None:
        """Give model callbacks the trainer, and call `on_train_begin`."""
        for callback in self.callbacks:
            if isinstance(callback, ModelCallback):
                callback.trainer = trainer
            self._note_stop(callback.on_train_begin(trainer.view))
        self.agree_on_stop()

    def step_end(self, step: int, metrics: Metrics) -> None:
        """Call `on_step_end`; the metrics that injectors add are converted to Python values first."""
        for callback in self._converting(metrics):
            self._note_stop(callback.on_step_end(step, metrics))
        self.agree_on_stop()

    def eval_end(self, step: int, metrics: Metrics) -> None:
        """Call `on_eval_end`; the metrics that injectors add are converted to Python values first."""
        for callback in self._converting(metrics):
            self._note_stop(callback.on_eval_end(step, metrics))
        self.agree_on_stop()

    def pause(self) -> None:
        """Call `on_pause`; raises EvaluationStoppedError if a callback asks to stop."""
        for callback in self.callbacks:
            if isinstance(request := callback.on_pause(), StopRun):
                self._note_stop(request)
                raise EvaluationStoppedError

    def checkpoints_saved(self, written: Iterable[tuple[int, Path]]) -> None:
        """Call `on_save` for each written checkpoint."""
        for step, path in written:
            for callback in self.callbacks:
                self._note_stop(callback.on_save(step, path))

    def train_end(self, result: "RunResult") -> None:
        """Call `on_train_end`."""
        for callback in self.callbacks:
            callback.on_train_end(result)

    def touches_model(self, step: int) -> bool:
        """Return whether any callback uses the model after this step."""
        return any(c.touches_model(step) for c in self.callbacks if isinstance(c, ModelCallback))

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the states to store in a checkpoint, by name."""
        return {name: state for name, c in with_state_names(self.callbacks) if (state := c.state())}

    def restore(self, states: dict[str, Any]) -> None:  # Any: JSON values
        """Restore the callbacks whose states are in a checkpoint."""
        states = upgrade_state_names(states)
        for name, callback in with_state_names(self.callbacks):
            if name in states:
                callback.restore(states[name])

    def agree_on_stop(self) -> None:
        """Make all ranks stop after the same step and for the same reason, if any rank stops."""
        if self.world.size == 1:
            return
        for rank, fields in enumerate(self.world.gather(None if self.stop is None else asdict(self.stop))):
            if fields is not None:
                if self.stop is None:
                    log.info("stopping: rank %d: %s", rank, fields["reason"])
                self.stop = StopRun(**fields)
                return

    def _note_stop(self, request: StopRun | None) -> None:
        if isinstance(request, StopRun) and self.stop is None:
            self.stop = request
            log.info("stopping: %s", request.reason)

    def _converting(self, metrics: Metrics) -> Iterable[Callback]:
        for callback in self.callbacks:
            if isinstance(callback, Injector):
                yield callback
        metrics.update(to_python(metrics))
        for callback in self.callbacks:
            if not isinstance(callback, Injector):
                yield callback
