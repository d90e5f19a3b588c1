"""The training loop, which is the same for every objective."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from whet.config.load_config import to_dict
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, IteratorStream, Step, StepStream
from whet.errors import RunError
from whet.hardware import Precision, choose_precision, peak_gib
from whet.models.heads import ModelWithHeads
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.ops.dispatch import current_paths
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.training.callback_list import CallbackList
from whet.training.callbacks import Callback, Metrics, RunView, StopRun
from whet.training.checkpoint import (
    checkpoint_contents,
    gather_random_states,
    load_checkpoint,
    restore_random_states,
)
from whet.training.checkpoint_writer import CheckpointWriter
from whet.training.early_stopping import note_best, restore_best_weights
from whet.training.loss import Evaluation, loss_weight
from whet.training.optim.lr_schedules import Schedule
from whet.training.optim.optimizers import prepare_optimizer
from whet.training.prefetch import ComputedStep, StepClock, StepQueue, supports_prefetch
from whet.training.settings import TrainSettings, resolve_total_steps
from whet.training.state import RunResult, RunState
from whet.training.step import TrainStep

log = logging.getLogger("whet")


class Trainer:
    """Trains a model on the batches of a stream with one objective.

    Args:
        model: The model. Its parameters with `requires_grad` are trained.
        objective: The loss to minimize.
        steps: A StepStream, or an iterable that yields the list of micro-batches of each step.
        config: A run config, which provides the optimizer, schedule, number of steps and settings. Without
            one, pass an `optimizer`.
        callbacks: Callbacks to call during training.
        optimizer: A torch optimizer over the parameters to train.
        schedule: A function from the step, counted from 1, to the learning rate of the first parameter group.
            Other groups keep their ratio to it. By default, the learning rates that the optimizer or a torch
            scheduler has at each step.
        total_steps: The number of steps. Without it and without a config, training ends with `steps`.
        eval_batches: The batches of the evaluation loss.
        evaluators: Functions that return further metrics of an evaluation, such as exact match.
        directory: The run directory for checkpoints; None to write none.
        precision: The dtypes to use, if already chosen. By default, from the settings and the device.
        settings: Clipping, checkpoints and evaluations, if there is no config.
        world: The ranks that share each step. All get the same batches, and each computes its share.

    Raises:
        RunError: If neither an optimizer nor a config is given, or the arguments do not fit together.
    """

    def __init__(
        self,
        model: Trainable,
        objective: Objective,
        steps: StepStream | Iterable[Sequence[Batch]],
        config: RunConfig | None = None,
        callbacks: Iterable[Callback] = (),
        *,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Schedule | None = None,
        total_steps: int | None = None,
        eval_batches: Sequence[Batch] = (),
        evaluators: Sequence[Callable[[], Metrics]] = (),
        directory: str | Path | None = None,
        precision: Precision | None = None,
        settings: TrainSettings | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        if not isinstance(objective, Objective):
            raise RunError(
                f"{type(objective).__name__} is not an objective", hint="inherit from whet.Objective"
            )
        if config is None and optimizer is None:
            raise RunError("a trainer needs an optimizer, or a config that describes one")
        self.model = model
        self.objective = objective
        self.config = config
        self.settings = settings or (TrainSettings() if config is None else TrainSettings.from_config(config))
        self.stream = steps if isinstance(steps, StepStream) else IteratorStream(steps)
        self.world = world
        self.directory = None if directory is None else Path(directory)
        self.device = model.device
        self.precision = precision or choose_precision(self.settings.precision, self.device)
        self.total_steps = resolve_total_steps(total_steps, config)
        if self.settings.freeze_pad_row:
            from whet.models.pad_row import freeze_pad_row

            freeze_pad_row(model)
        self.learner = model if objective.heads is None else ModelWithHeads(model, objective.heads)
        self.optimizer, self.lr_at = prepare_optimizer(
            optimizer, schedule, config, self.learner, self.total_steps
        )
        self.train_step = TrainStep(
            model,
            objective,
            self.learner,
            self.optimizer,
            precision=self.precision,
            max_norm=self.settings.clip,
            world=world,
        )
        self.trained = self.train_step.trained
        self.state = RunState(loss_scale=self.train_step.loss_scale)
        self.queue = StepQueue(self.stream, self.train_step)
        paths = current_paths()
        self.prefetches = supports_prefetch(paths, self.device, self.precision, world)
        if not paths.prefetch:
            log.info("reference path: plain torch, without fast paths")
        self.callbacks = CallbackList(callbacks, world)
        self.eval_batches = eval_batches
        self.evaluators = evaluators
        self.evaluation = Evaluation(self.callbacks, world)
        self.history: list[Metrics] = []
        self.last_step: Step | None = None
        self.view = RunView(self)
        self._writer: CheckpointWriter | None = None
        if self.directory is not None:
            self._writer = CheckpointWriter(self.directory, self.settings.checkpoint, world)
        self.clock = StepClock()

    def fit(self) -> RunResult:
        """Train to the end, call `on_train_end` of the callbacks, and return the result."""
        result = self.train()
        self.end(result)
        return result

    def train(self) -> RunResult:
        """Train to the last step or until a callback stops the run; `end` must be called afterwards."""
        try:
            return self._train()
        except Exception:
            self._wait_for_save()  # a save that started before the failure is still useful
            raise

    def _train(self) -> RunResult:
        self.clock.start(self.state.elapsed_s)
        self.callbacks.train_begin(self)
        self._evaluate_if_due()
        while not self.is_last(self.state.step) and self.stop is None:
            metrics = self._next_step()
            if metrics is None:
                break
            self.callbacks.step_end(self.state.step, metrics)
            self._record(metrics)
            self._evaluate_if_due()
            # The last step is saved once, after the final evaluation.
            if self._writer is not None and not self.is_last(self.state.step):
                due = self._writer.is_due(self.state.step)
                if self.world.broadcast(due) if self.settings.checkpoint.minutes else due:
                    self.save()
                self.callbacks.checkpoints_saved(self._writer.pop_completed())
        return self._finish()

    def is_last(self, step: int) -> bool:
        """Return whether no step follows this one; total_steps may have been reduced on resume."""
        return self.total_steps is not None and step >= self.total_steps

    def step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """Apply one update from the given micro-batches, and return its metrics.

        The loss is summed over all micro-batches and divided once by their total weights.
        """
        start = self.clock.start_step(prefetched=False)
        step = micro_batches if isinstance(micro_batches, Step) else Step(micro_batches)
        return self._complete(self.queue.compute(step), start=start)

    def collect_gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Store the gradients of micro-batches in the parameters, and return the loss and the metrics.

        The sums of the loss terms are divided by `weights`, or by the total weights of these micro-batches.
        """
        return self.train_step.unscaled_gradients(micro_batches, weights)

    def apply_gradients(self) -> Metrics:
        """Apply one update from the parameters' gradients, clipped and with the scheduled learning rate.

        Raises:
            RunError: If the gradient norm is non-finite. The weights are then unchanged.
        """
        lr = self.lr_at(self.state.step + 1)
        norm, skipped = self.train_step.update_from_unscaled(lr=lr)
        if skipped:
            raise RunError(f"the gradient norm is {norm}; the update was skipped, the weights are unchanged")
        self.state.loss_scale.note_good_step()
        self.state.step += 1
        return {"lr": lr, "grad_norm": norm}

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Return the mean loss per supervised token over batches, its perplexity and further metrics."""
        return self.evaluation.loss(self.model, self.objective, batches, precision=self.precision)

    def pause_point(self) -> None:
        """Abort the evaluation in progress if a callback asks to stop; call this often during evaluations."""
        self.evaluation.pause_point()

    def pause_between_completions(self) -> None:
        """Abort generation for an evaluation if a callback asks to stop; call this between completions."""
        self.evaluation.pause_between_completions()

    def save(self) -> None:
        """Save a checkpoint of the current step, unless it is saved already or the run has no directory.

        The tensors may still be copied in the background when this returns. The next update waits for it.
        """
        self.queue.cancel()
        if self._writer is None or self.world.broadcast(self._writer.saved_step == self.state.step):
            return
        contents = checkpoint_contents(self.learner, self.optimizer, self.state.step, self._run_state())
        with self.world.watchdog.long_operation("saving"):
            self._writer.save(self.state.step, contents, best_steps=tuple(self.state.best_steps))

    def restore(self, path: Path) -> None:
        """Restore weights, optimizer, data position, random state and callbacks from a checkpoint."""
        state = load_checkpoint(path, self.learner, self.optimizer, world=self.world)
        self.state = RunState.from_checkpoint(state["run"])
        self.train_step.loss_scale = self.state.loss_scale
        if self._writer is not None:
            self._writer.saved_step = self.state.step
        self.callbacks.stop = None if self.state.stopped is None else StopRun(self.state.stopped)
        restore_random_states(state, self.world)
        self.stream.seek(state["data"])
        self.callbacks.restore(state["callbacks"])

    def _next_step(self) -> Metrics | None:
        """Return the metrics of the next step, or None at the end of a stream of unknown length."""
        start = self.clock.start_step(prefetched=self.queue.prefetched is not None)
        try:
            computed = self.queue.next_step()
        except StopIteration:
            if self.total_steps is None:
                return None
            raise RunError(
                f"the batches ran out after step {self.state.step} of {self.total_steps}",
                hint="the iterable must yield one list of micro-batches per step",
            ) from None
        return self._complete(computed, start=start, prefetch=self._may_prefetch(self.state.step + 1))

    def _may_prefetch(self, step: int) -> bool:
        """Return whether the next step may be queued now: nothing reads the state between the two steps."""
        return (
            self.prefetches
            and not self.is_last(step)
            and not (self._evaluates and self.settings.evaluates_at(step))
            and not (self._writer is not None and self._writer.is_due(step))
            and not self.callbacks.touches_model(step)
            and self.stream.can_prefetch()
        )

    def _complete(self, computed: ComputedStep, *, start: float, prefetch: bool = False) -> Metrics:
        """Apply the update of a step, and return its metrics."""
        lr, step = self.lr_at(self.state.step + 1), computed.step
        before_update = (lambda: None) if self._writer is None else self._writer.wait_for_copy
        applied = self.queue.apply(computed, lr=lr, before_update=before_update, prefetch=prefetch)
        metrics = applied.metrics
        if applied.skipped:
            self._report_nonfinite(computed, metrics["loss"], applied.norm)
        self.state.count_step(skipped=applied.skipped)
        self.world.watchdog.report_step(self.state.step)
        seconds, self.state.elapsed_s = self.clock.end_step(start, applied.device_seconds)
        self.last_step = step
        self.view.note_step(weight=loss_weight(self.objective, step), weighted=frozenset(metrics))
        peak = peak_gib(self.device)
        row = self.state.step_metrics(step, metrics, lr=lr, norm=applied.norm, seconds=seconds, peak_gib=peak)
        row |= step.metrics
        self.stream.after_update(step, self.state.step, row)
        return row

    def _report_nonfinite(self, computed: ComputedStep, loss: float, norm: float) -> None:
        """Log a warning, or save a checkpoint of the state before this step and raise an error."""
        from whet.training.nonfinite import report_nonfinite

        directory = self.directory if self.world.is_main else None
        error = report_nonfinite(self.state, computed.step, directory, self.settings, loss=loss, norm=norm)
        if error is not None:
            self.queue.cancel()
            self.queue.rewind(computed)
            self.save()
            raise error

    def _wait_for_save(self) -> None:
        if self._writer is not None:
            with self.world.watchdog.long_operation("saving"):
                self._writer.wait()
            self.callbacks.checkpoints_saved(self._writer.pop_completed())

    def _run_state(self) -> Metrics:
        self.state.stopped = None if self.stop is None or self.stop.unfinished else self.stop.reason
        return {
            "config": {} if self.config is None else to_dict(self.config),
            "run": asdict(self.state),
            **gather_random_states(self.world),
            "data": self.stream.state(),
            "callbacks": self.callbacks.state(),
        }

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step and at intervals; a run that must stop evaluates after resuming."""
        must_stop = self.stop is not None and self.stop.unfinished
        if not must_stop and (self.state.step == 0 or self.settings.evaluates_at(self.state.step)):
            self._evaluate_now()

    def _evaluate_now(self) -> None:
        """Evaluate, at most once per step, and save a checkpoint if the result is the best so far."""
        if not self._evaluates or self.state.evaluated_step == self.state.step:
            return
        loss = [lambda: self.evaluate(self.eval_batches)] if self.eval_batches else []
        metrics = self.evaluation.run([*loss, *self.evaluators])
        if metrics is None:
            return
        self.state.evaluated_step = self.state.step
        self.callbacks.eval_end(self.state.step, metrics)
        self._record(metrics)
        # Untrained weights are saved only if they may have to be restored.
        is_best = note_best(self.state, metrics, self.settings.best_metric)
        if is_best and (self.state.step or self.settings.restores_best):
            self.save()

    @property
    def _evaluates(self) -> bool:
        return bool(self.eval_batches or self.evaluators)

    @property
    def stop(self) -> StopRun | None:
        """The request of a callback to stop the run, or None."""
        return self.callbacks.stop

    def _record(self, metrics: Metrics) -> None:
        row = {"step": self.state.step, **metrics}
        self.history.append(row)
        self.state.latest |= row

    def _finish(self) -> RunResult:
        self.queue.cancel()
        finished = self.stop is None or not self.stop.unfinished or self.is_last(self.state.step)
        if finished:
            self._evaluate_now()
            finished = not self._evaluates or self.state.evaluated_step == self.state.step
        self.save()
        self._wait_for_save()
        self.world.barrier()
        if finished and self.settings.restores_best and self.directory is not None:
            restore_best_weights(self.directory, self.learner, self.state, world=self.world)
        return RunResult.from_state(
            self.state,
            self.history,
            self.directory,
            because="finished" if self.stop is None else self.stop.reason,
            unfinished=not finished,
            fingerprint=self.model.fingerprint,
        )

    def end(self, result: RunResult) -> None:
        """Call `on_train_end` of the callbacks; raises RunError if the last checkpoint was not written."""
        with self.world.watchdog.long_operation("finishing"):
            self.callbacks.train_end(result)
        if self._writer is not None:
            self._writer.raise_failure(unfinished=result.unfinished)
