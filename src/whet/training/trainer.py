"""The one trainer: it drives every objective and knows none of them."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whet.config.load_config import to_dict
from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.errors import RunError, check_positive
from whet.hardware import Precision
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.parallel.process_group import SOLO, World
from whet.training.callbacks import (
    Callback,
    EvaluationStoppedError,
    Injector,
    Metrics,
    StopRun,
    in_order,
    named,
    plain,
    stored_states,
)
from whet.training.checkpoint import (
    contents_of,
    load_checkpoint,
    random_state,
    restore_random_state,
)
from whet.training.checkpoint_writer import CheckpointWriter
from whet.training.early_stopping import is_better, restore_best_weights
from whet.training.loss import evaluate_loss
from whet.training.state import RunResult, RunState
from whet.training.step import TrainStep

log = logging.getLogger("whet")


class Trainer(TrainStep):
    """Steps a model through batches towards an objective.

    `batches` yields, for each optimizer step, the list of its micro-batches. `evaluators` add their own
    numbers (exact match, say) to the loss on `eval_batches`. In a `world` of several processes all of them
    get the same batches, and each computes its share.
    """

    def __init__(
        self,
        model: Trainable,
        objective: Objective,
        batches: Iterable[list[Batch]],
        config: RunConfig,
        callbacks: Iterable[Callback] = (),
        *,
        total_steps: int | None = None,
        eval_batches: Sequence[Batch] = (),
        evaluators: Sequence[Callable[[], Metrics]] = (),
        directory: str | Path | None = None,
        precision: Precision | None = None,
        world: World = SOLO,
    ) -> None:
        steps = config.run.steps if total_steps is None else total_steps
        if steps is None:
            raise RunError("a trainer needs total_steps when the config counts epochs")
        check_positive(total_steps=steps)
        super().__init__(
            model,
            objective,
            batches,
            config,
            total_steps=steps,
            directory=None if directory is None else Path(directory),
            precision=precision,
            world=world,
        )
        self.callbacks = in_order(c for c in callbacks if world.is_main or not c.main_only)
        self.eval_batches = eval_batches
        self.evaluators = evaluators
        self.history: list[Metrics] = []
        self.stop: StopRun | None = None
        self._saver = (
            None if self.directory is None else CheckpointWriter(self.directory, config.checkpoint, world)
        )

    def fit(self) -> RunResult:
        """Run to the end, or to wherever a callback stops it."""
        try:
            return self._fit()
        except Exception:
            self._wait_for_save()  # what was begun before a failure is still worth having
            raise

    def _fit(self) -> RunResult:
        self._clock = time.perf_counter() - self.state.elapsed_s
        self._tell("on_train_begin", self)
        self._agree_on_stop()
        self._evaluate_if_due()
        while self.state.step < self.total_steps and self.stop is None:
            metrics = self._next_step()
            self._tell_numbers("on_step_end", metrics)
            self._remember(metrics)
            self._agree_on_stop()
            self._evaluate_if_due()
            # the last step is saved once, at the end, after its evaluation
            if self._saver is not None and self.state.step < self.total_steps:
                due = self._saver.due(self.state.step)
                if self.world.from_main(due) if self.config.checkpoint.minutes else due:
                    self.save()
                self._tell_of_saves()
        return self._finish()

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Loss over batches, weighted by tokens, and its perplexity."""
        return evaluate_loss(
            self.model,
            self.objective,
            batches,
            precision=self.precision,
            pause=self.pause_point,
            world=self.world,
        )

    def pause_point(self) -> None:
        """Called often during an evaluation: break it off where a callback wants the run to stop."""
        self.world.watch.doing("evaluating")
        for callback in self.callbacks:
            if isinstance(answer := callback.on_pause(), StopRun):
                self._obey(answer)
                raise EvaluationStoppedError

    def save(self) -> None:
        """Save a checkpoint of this step, once; a run without a directory has none.

        It may still be copied from the model when this returns; `step` waits for that before it updates.
        """
        self._stay_here()
        if self._saver is None or self.world.from_main(self._saver.saved_step == self.state.step):
            return
        contents = contents_of(self.learner, self.optimizer, self.state.step, self._run_state())
        with self.world.watch.patiently("saving"):
            self._saver.save(self.state.step, contents, best_steps=tuple(self.state.best_steps))

    def _before_update(self) -> None:
        if self._saver is not None:
            self._saver.before_update()

    def _model_is_wanted_after(self, step: int) -> bool:
        return (
            (self._evaluates and self._due_at(step, self.config.eval.every))
            or (self._saver is not None and self._saver.due(step))
            or any(callback.touches_model(step) for callback in self.callbacks)
        )

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            with self.world.watch.patiently("saving"):
                self._saver.wait()
            self._tell_of_saves()

    def _tell_of_saves(self) -> None:
        for step, path in self._saver.written() if self._saver is not None else ():
            self._tell("on_save", step, path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint: everything the run needs, or an error."""
        state = load_checkpoint(path, self.learner, self.optimizer, world=self.world)
        self.state = RunState.from_checkpoint(state["run"])
        if self._saver is not None:
            self._saver.saved_step = self.state.step
        self.stop = None if self.state.stopped is None else StopRun(self.state.stopped)
        streams = [state["random"], *state.get("random_elsewhere", ())]
        if self.world.rank < len(streams):  # else: one of more ranks than before, seeded as such
            restore_random_state(streams[self.world.rank])
        self.source.seek(state["data"])  # type: ignore[attr-defined]  # a stream that was saved can seek
        states = stored_states(state["callbacks"])
        for name, callback in named(self.callbacks):
            if name in states:
                callback.restore(states[name])

    def _run_state(self) -> Metrics:
        here, *elsewhere = self.world.gather(random_state())
        return {
            "config": to_dict(self.config),
            "run": asdict(self.state),
            "random": here,
            **({"random_elsewhere": elsewhere} if elsewhere else {}),
            "data": self.source.state() if hasattr(self.source, "state") else {},
            "callbacks": {name: state for name, c in named(self.callbacks) if (state := c.state())},
        }

    @staticmethod
    def _due_at(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _evaluate_if_due(self) -> None:
        """Before the first step and at intervals; a run that must stop now does it when it is resumed."""
        hurry = self.stop is not None and self.stop.unfinished
        if not hurry and (self.state.step == 0 or self._due_at(self.state.step, self.config.eval.every)):
            self._evaluate_and_tell()

    def _evaluate_and_tell(self) -> None:
        """Evaluate, once a step, tell the callbacks, and keep a checkpoint when it is the best so far."""
        if not self._evaluates or self.state.evaluated_step == self.state.step:
            return
        started = time.perf_counter()
        try:
            metrics = self.evaluate(self.eval_batches) if self.eval_batches else {}
            for evaluator in self.evaluators:
                metrics |= evaluator()
        except EvaluationStoppedError:
            self._agree_on_stop()
            return
        metrics["eval_s"] = time.perf_counter() - started
        self.state.evaluated_step = self.state.step
        self._tell_numbers("on_eval_end", metrics)
        self._remember(metrics)
        self._agree_on_stop()
        early = self.config.eval.early_stop
        usual = "eval_loss" if "eval_loss" in metrics else "eval_reward"
        watched = early.metric if early is not None else usual
        best = self.state.best
        if watched in metrics and is_better(watched, metrics[watched], best["value"] if best else None):
            self.state.best = {"metric": watched, "value": metrics[watched], "step": self.state.step}
            self.state.best_steps.append(self.state.step)
            if self.state.step or early is not None:  # nobody asks for untouched weights back otherwise
                self.save()

    @property
    def _evaluates(self) -> bool:
        return bool(self.eval_batches or self.evaluators)

    def _remember(self, metrics: Metrics) -> None:
        row = {"step": self.state.step, **metrics}
        self.history.append(row)
        self.state.latest |= row

    def _tell_numbers(self, hook: str, metrics: Metrics) -> None:
        """Injectors first; what they write is plain for all who read it, checkpoints too."""
        writers = [callback for callback in self.callbacks if isinstance(callback, Injector)]
        readers = [callback for callback in self.callbacks if not isinstance(callback, Injector)]
        self._tell(hook, self.state.step, metrics, to=writers)
        metrics.update(plain(metrics))
        self._tell(hook, self.state.step, metrics, to=readers)

    def _tell(
        self,
        hook: str,
        *arguments: Any,  # Any: what the hook takes
        to: Sequence[Callback] | None = None,
    ) -> None:
        for callback in self.callbacks if to is None else to:
            answer = getattr(callback, hook)(*arguments)
            if isinstance(answer, StopRun):
                self._obey(answer)

    def _obey(self, stop: StopRun) -> None:
        if self.stop is None:
            self.stop = stop
            self.state.stopped = None if stop.unfinished else stop.reason
            log.info("stopping: %s", stop.reason)

    def _agree_on_stop(self) -> None:
        """What one rank stops for, all stop for: after the same step, for the same reason."""
        if self.world.size == 1:
            return
        for rank, fields in enumerate(self.world.gather(None if self.stop is None else asdict(self.stop))):
            if fields is not None:
                stop = StopRun(**fields)
                if self.stop is None:
                    log.info("stopping: rank %d: %s", rank, stop.reason)
                self.stop = stop
                self.state.stopped = None if stop.unfinished else stop.reason
                return

    def _finish(self) -> RunResult:
        self._stay_here()
        finished = self.stop is None or not self.stop.unfinished or self.state.step == self.total_steps
        if finished:
            self._evaluate_and_tell()
            finished = not self._evaluates or self.state.evaluated_step == self.state.step
        self.save()
        self._wait_for_save()
        self.world.barrier()
        if finished and self.config.eval.early_stop is not None and self.directory is not None:
            restore_best_weights(self.directory, self.learner, self.state, world=self.world)
        because = "finished" if self.stop is None else self.stop.reason
        result = RunResult(
            directory=self.directory,
            steps=self.state.step,
            metrics=self.state.latest,
            best=self.state.best,
            history=self.history,
            stopped_because=because,
            unfinished=not finished,
            summary=self.state.summary(because)
            | {
                "directory": str(self.directory) if self.directory else None,
                "fingerprint": self.model.fingerprint,
            },
        )
        with self.world.watch.patiently("finishing"):
            self._tell("on_train_end", result)
        if self._saver is not None and self._saver.failure is not None:
            raise RunError(
                f"the last checkpoint is missing: {self._saver.failure.message}",
                hint=f"make room, and go on with: whet resume {self.directory}"
                if result.unfinished
                else None,
            )
        return result
