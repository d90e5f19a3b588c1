"""The callbacks of a run: called in order, asked to stop, agreed on between ranks, saved and restored."""

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
    named,
    plain,
    stored_states,
)

if TYPE_CHECKING:
    from whet.training.state import RunResult
    from whet.training.trainer import Trainer

log = logging.getLogger("whet")


class CallbackList:
    """Calls callbacks, injectors first, and remembers the first StopRun that one of them returns."""

    def __init__(self, callbacks: Iterable[Callback], world: World) -> None:
        mine = [callback for callback in callbacks if world.is_main or not callback.main_only]
        self.callbacks = sorted(mine, key=lambda callback: not isinstance(callback, Injector))
        self.world = world
        self.stop: StopRun | None = None

    def begin(self, trainer: "Trainer") -> None:
        """Call on_train_begin; callbacks that use the model get the trainer first."""
        for callback in self.callbacks:
            if isinstance(callback, ModelCallback):
                callback.trainer = trainer
            self._note(callback.on_train_begin(trainer.view))
        self.agree_on_stop()

    def step_end(self, step: int, metrics: Metrics) -> None:
        """Call on_step_end: what injectors write is plain for all who read it, checkpoints too."""
        for callback in self._with_plain(metrics):
            self._note(callback.on_step_end(step, metrics))
        self.agree_on_stop()

    def eval_end(self, step: int, metrics: Metrics) -> None:
        """Call on_eval_end, likewise."""
        for callback in self._with_plain(metrics):
            self._note(callback.on_eval_end(step, metrics))
        self.agree_on_stop()

    def pause(self) -> None:
        """Call on_pause; raises EvaluationStoppedError where a callback wants the run to stop."""
        for callback in self.callbacks:
            if isinstance(answer := callback.on_pause(), StopRun):
                self._note(answer)
                raise EvaluationStoppedError

    def saved(self, written: Iterable[tuple[int, Path]]) -> None:
        """Call on_save for each checkpoint that is on disk."""
        for step, path in written:
            for callback in self.callbacks:
                self._note(callback.on_save(step, path))

    def end(self, result: "RunResult") -> None:
        """Call on_train_end."""
        for callback in self.callbacks:
            callback.on_train_end(result)

    def touch_model(self, step: int) -> bool:
        """Return whether one of them uses the model after this step."""
        return any(c.touches_model(step) for c in self.callbacks if isinstance(c, ModelCallback))

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the states of those that have one."""
        return {name: state for name, c in named(self.callbacks) if (state := c.state())}

    def restore(self, states: dict[str, Any]) -> None:  # Any: JSON values
        """Restore those whose state a checkpoint holds."""
        states = stored_states(states)
        for name, callback in named(self.callbacks):
            if name in states:
                callback.restore(states[name])

    def agree_on_stop(self) -> None:
        """What one rank stops for, all stop for: after the same step, for the same reason."""
        if self.world.size == 1:
            return
        for rank, fields in enumerate(self.world.gather(None if self.stop is None else asdict(self.stop))):
            if fields is not None:
                if self.stop is None:
                    log.info("stopping: rank %d: %s", rank, fields["reason"])
                self.stop = StopRun(**fields)
                return

    def _note(self, answer: StopRun | None) -> None:
        if isinstance(answer, StopRun) and self.stop is None:
            self.stop = answer
            log.info("stopping: %s", answer.reason)

    def _with_plain(self, metrics: Metrics) -> Iterable[Callback]:
        for callback in self.callbacks:
            if isinstance(callback, Injector):
                yield callback
        metrics.update(plain(metrics))
        for callback in self.callbacks:
            if not isinstance(callback, Injector):
                yield callback
