"""The one trainer: it drives every objective and knows none of them."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from whet.config.load_config import to_dict
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, IteratorStream, Step, StepStream
from whet.errors import RunError, check_positive
from whet.hardware import Precision, choose_precision, peak_gib
from whet.models.heads import WithHeads
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.ops.dispatch import chosen_paths
from whet.parallel.process_group import SOLO, World
from whet.training.callback_list import CallbackList
from whet.training.callbacks import Callback, EvaluationStoppedError, Metrics, RunView, StopRun
from whet.training.checkpoint import contents_of, load_checkpoint, random_state, restore_random_state
from whet.training.checkpoint_writer import CheckpointWriter
from whet.training.early_stopping import note_best, restore_best_weights
from whet.training.loss import evaluate_loss, loss_weight
from whet.training.optim.lr_schedules import Schedule, create_schedule
from whet.training.optim.optimizers import adopt_optimizer, create_optimizer
from whet.training.prefetch import Computed, Mark, PendingUpdate, StepClock, StepQueue
from whet.training.settings import TrainSettings
from whet.training.state import RunResult, RunState
from whet.training.step import TrainStep

log = logging.getLogger("whet")


class Trainer:
    """Steps a model through batches towards an objective.

    Args:
        model: What is trained: parameters with `requires_grad`.
        objective: What is optimised.
        steps: A StepStream, or any iterable that yields the list of micro-batches of each step.
        config: A whole config, from which optimizer, schedule, total_steps and settings are taken. Without
            one, give an `optimizer`.
        callbacks: See Callback.
        optimizer: Any torch optimizer over the parameters that train.
        schedule: `step -> learning rate`, counted from 1, of the first parameter group; the others keep their
            ratio to it. Default: the rates that the optimizer, or a scheduler of torch's, has at each step.
        total_steps: Where to stop; None with neither a config: where `steps` ends.
        eval_batches: What the evaluation loss is computed on.
        evaluators: Each returns metrics that are added to an evaluation, such as exact match.
        directory: Where checkpoints are written; None: nowhere.
        precision: Dtypes, where they were chosen already.
        settings: Clipping, checkpoints, evaluations and the like, where there is no config.
        world: The processes that share each step: all get the same batches, and each computes its share.
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
        world: World = SOLO,
    ) -> None:
        if not isinstance(objective, Objective):
            raise RunError(
                f"{type(objective).__name__} is not an objective", hint="let it inherit from whet.Objective"
            )
        if config is None and optimizer is None:
            raise RunError("a trainer needs an optimizer, or a config that describes one")
        self.model = model
        self.objective = objective
        self.config = config
        self.settings = settings or (TrainSettings() if config is None else TrainSettings.of(config))
        self.stream = steps if isinstance(steps, StepStream) else IteratorStream(steps)
        self.world = world
        self.directory = None if directory is None else Path(directory)
        self.device = model.device
        self.precision = precision or choose_precision(self.settings.precision, self.device)
        self.total_steps = total_steps if total_steps is not None or config is None else config.run.steps
        if self.total_steps is not None:
            check_positive(total_steps=self.total_steps)
        elif config is not None:
            raise RunError("a trainer needs total_steps when the config counts epochs")
        if self.settings.freeze_pad_row:
            from whet.models.pad_row import freeze_pad_row

            freeze_pad_row(model)
        self.learner = model if objective.heads is None else WithHeads(model, objective.heads)
        if optimizer is None:
            assert config is not None
            self.optimizer = create_optimizer(config.optim_groups, self.learner)
            self.lr_at = schedule or create_schedule(config.optim, self.total_steps)
        else:
            self.optimizer = optimizer
            self.lr_at = adopt_optimizer(optimizer, schedule)
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
        # on a CPU there is nothing to gain, fp16 may compute a step again, and ranks must agree in between
        paths = chosen_paths()
        self.prefetches = (
            paths.prefetch
            and self.device.type == "cuda"
            and self.precision.compute != torch.float16
            and world.size == 1
        )
        if not paths.prefetch:
            log.info("reference path: plain torch, without fast paths")
        self.callbacks = CallbackList(callbacks, world)
        self.eval_batches = eval_batches
        self.evaluators = evaluators
        self.history: list[Metrics] = []
        self.last_step: Step | None = None
        self.view = RunView(self)
        self._saver = (
            None
            if self.directory is None
            else CheckpointWriter(self.directory, self.settings.checkpoint, world)
        )
        self.clock = StepClock()

    def fit(self) -> RunResult:
        """Train, and tell the callbacks how it ended."""
        result = self.train()
        self.end(result)
        return result

    def train(self) -> RunResult:
        """Run to the end, or to wherever a callback stops it."""
        try:
            return self._train()
        except Exception:
            self._wait_for_save()  # what was begun before a failure is still worth having
            raise

    def _train(self) -> RunResult:
        self.clock.start(self.state.elapsed_s)
        self.callbacks.begin(self)
        self._evaluate_if_due()
        while not self.is_last(self.state.step) and self.stop is None:
            metrics = self._next_step()
            if metrics is None:
                break
            self.callbacks.step_end(self.state.step, metrics)
            self._remember(metrics)
            self._evaluate_if_due()
            # the last step is saved once, at the end, after its evaluation
            if self._saver is not None and not self.is_last(self.state.step):
                due = self._saver.due(self.state.step)
                if self.world.from_main(due) if self.settings.checkpoint.minutes else due:
                    self.save()
                self.callbacks.saved(self._saver.written())
        return self._finish()

    def is_last(self, step: int) -> bool:
        """Return whether there is nothing to do after this step; a resumed run may have fewer than before."""
        return self.total_steps is not None and step >= self.total_steps

    def step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """Make one update from all micro-batches: their sums, divided once by the weights of all of them."""
        began, mark = self.clock.step_began(prefetched=False), Mark(self.device)
        step = micro_batches if isinstance(micro_batches, Step) else Step(micro_batches)
        return self._complete(Computed(step, self.train_step.gradients(step), mark), began=began)

    def collect_gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Put the gradients of some micro-batches into the parameters, without an update.

        Sums are divided by `weights`, or by the weights of these micro-batches. Returns the loss and metrics.
        """
        return self.train_step.unscaled_gradients(micro_batches, weights)

    def apply_gradients(self) -> Metrics:
        """Make one update from the gradients in the parameters, clipped and at the schedule's rate."""
        lr = self.lr_at(self.state.step + 1)
        norm, skipped = self.train_step.update_from_unscaled(lr=lr)
        if skipped:
            raise RunError(f"the gradient norm is {norm}: no weight was changed")
        self.state.loss_scale.note_good_step()
        self.state.step += 1
        return {"lr": lr, "grad_norm": norm}

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Return the loss over batches, weighted by tokens, and its perplexity."""
        return evaluate_loss(
            self.model,
            self.objective,
            batches,
            precision=self.precision,
            pause=self.pause_point,
            world=self.world,
        )

    def pause_point(self) -> None:
        """Break off an evaluation where a callback wants the run to stop; called often during one."""
        self.world.watch.doing("evaluating")
        self.callbacks.pause()

    def pause_between_answers(self) -> None:
        """The same while answers are generated; ranks that generate together stop together, afterwards."""
        if self.world.tensor > 1:
            self.world.watch.doing("generating")
        else:
            self.pause_point()

    def save(self) -> None:
        """Save a checkpoint of this step, once; a run without a directory has none.

        It may still be copied from the model when this returns; the next update waits for that.
        """
        self.queue.cancel()
        if self._saver is None or self.world.from_main(self._saver.saved_step == self.state.step):
            return
        contents = contents_of(self.learner, self.optimizer, self.state.step, self._run_state())
        with self.world.watch.patiently("saving"):
            self._saver.save(self.state.step, contents, best_steps=tuple(self.state.best_steps))

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint: everything the run needs, or an error."""
        state = load_checkpoint(path, self.learner, self.optimizer, world=self.world)
        self.state = RunState.from_checkpoint(state["run"])
        self.train_step.loss_scale = self.state.loss_scale
        if self._saver is not None:
            self._saver.saved_step = self.state.step
        self.callbacks.stop = None if self.state.stopped is None else StopRun(self.state.stopped)
        streams = [state["random"], *state.get("random_elsewhere", ())]
        if self.world.rank < len(streams):  # else: one of more ranks than before, seeded as such
            restore_random_state(streams[self.world.rank])
        self.stream.seek(state["data"])
        self.callbacks.restore(state["callbacks"])

    def _next_step(self) -> Metrics | None:
        """Return the metrics of the next step, or None where a stream of unknown length has ended.

        On a GPU the step after it is queued before they are read.
        """
        began = self.clock.step_began(prefetched=self.queue.prefetched is not None)
        try:
            computed = self.queue.take()
        except StopIteration:
            if self.total_steps is None:
                return None
            raise RunError(
                f"the batches ran out after step {self.state.step} of {self.total_steps}",
                hint="batches must yield one list of micro-batches for each step",
            ) from None
        return self._complete(computed, began=began, prefetch=self._may_prefetch(self.state.step + 1))

    def _may_prefetch(self, step: int) -> bool:
        """Whether nothing but metrics is wanted between this step and the next."""
        return (
            self.prefetches
            and not self.is_last(step)
            and not (self._evaluates and self._due_at(step, self.settings.eval_every))
            and not (self._saver is not None and self._saver.due(step))
            and not self.callbacks.touch_model(step)
            and self.stream.can_prefetch()
        )

    def _complete(self, computed: Computed, *, began: float, prefetch: bool = False) -> Metrics:
        """Update, and return the row of the step."""
        lr, scale, step = self.lr_at(self.state.step + 1), self.state.loss_scale, computed.step
        scale_before = scale.value
        pending = self._update(computed.sums, lr=lr)
        if prefetch:
            self.queue.prefetch()
        metrics, norm, skipped = pending.read()
        while skipped and scale.shrink_after(metrics["loss"]):  # an overflow of fp16: the same again, smaller
            pending = self._update(self.train_step.gradients(step), lr=lr)
            metrics, norm, skipped = pending.read()
        if skipped:
            scale.value = scale_before  # it was not to blame
            self._report_nonfinite(computed, metrics["loss"], norm)
            metrics["skipped"] = True
        else:
            scale.note_good_step()
        if self.precision.compute == torch.float16:
            metrics["loss_scale"] = scale.value
        self.state.nonfinite_in_a_row = self.state.nonfinite_in_a_row + 1 if skipped else 0
        self.state.step += 1
        self.world.watch.at_step(self.state.step)
        on_device = computed.began.seconds_until(pending.reading.arrived)
        seconds, self.state.elapsed_s = self.clock.end_step(began, on_device)
        self.last_step = step
        self.view.note_step(weight=loss_weight(self.objective, step), weighted=frozenset(metrics))
        tokens = sum(batch.real_tokens for batch in step)
        supervised = sum(batch.supervised for batch in step)
        row = {
            **metrics,
            "lr": lr,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": supervised,
            **self.state.count(tokens, supervised),
            "tokens_per_s": tokens / seconds,
            "step_s": seconds,
            "elapsed_s": self.state.elapsed_s,
            "peak_gib": self.state.peak(peak_gib(self.device)),
            **step.metrics,
        }
        self.stream.after_update(step, self.state.step, row)
        return row

    def _update(self, sums: dict[str, torch.Tensor], *, lr: float) -> PendingUpdate:
        wait = (lambda: None) if self._saver is None else self._saver.before_update
        return self.train_step.update(sums, lr=lr, before_update=wait)

    def _report_nonfinite(self, computed: Computed, loss: float, norm: float) -> None:
        """Warn that the weights were left as they were, or stop with a checkpoint of before this step."""
        from whet.training.nonfinite import report_nonfinite

        directory = self.directory if self.world.is_main else None
        in_a_row = self.state.nonfinite_in_a_row + 1
        error = report_nonfinite(
            self.state.step + 1,
            computed.step,
            directory,
            self.settings,
            loss=loss,
            norm=norm,
            in_a_row=in_a_row,
        )
        if error is not None:
            self.queue.cancel()
            self.queue.rewind(computed)
            self.save()
            raise error

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            with self.world.watch.patiently("saving"):
                self._saver.wait()
            self.callbacks.saved(self._saver.written())

    def _run_state(self) -> Metrics:
        here, *elsewhere = self.world.gather(random_state())
        self.state.stopped = None if self.stop is None or self.stop.unfinished else self.stop.reason
        return {
            "config": {} if self.config is None else to_dict(self.config),
            "run": asdict(self.state),
            "random": here,
            **({"random_elsewhere": elsewhere} if elsewhere else {}),
            "data": self.stream.state(),
            "callbacks": self.callbacks.state(),
        }

    @staticmethod
    def _due_at(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _evaluate_if_due(self) -> None:
        """Before the first step and at intervals; a run that must stop now does it when it is resumed."""
        hurry = self.stop is not None and self.stop.unfinished
        if not hurry and (self.state.step == 0 or self._due_at(self.state.step, self.settings.eval_every)):
            self._evaluate_now()

    def _evaluate_now(self) -> None:
        """Evaluate, once a step, call the callbacks, and save a checkpoint when it is the best so far."""
        if not self._evaluates or self.state.evaluated_step == self.state.step:
            return
        started = time.perf_counter()
        try:
            metrics = self.evaluate(self.eval_batches) if self.eval_batches else {}
            for evaluator in self.evaluators:
                metrics |= evaluator()
        except EvaluationStoppedError:
            self.callbacks.agree_on_stop()
            return
        metrics["eval_s"] = time.perf_counter() - started
        self.state.evaluated_step = self.state.step
        self.callbacks.eval_end(self.state.step, metrics)
        self._remember(metrics)
        # untouched weights are saved only where they may be asked for again
        is_best = note_best(self.state, metrics, self.settings.best_metric)
        if is_best and (self.state.step or self.settings.restores_best):
            self.save()

    @property
    def _evaluates(self) -> bool:
        return bool(self.eval_batches or self.evaluators)

    @property
    def stop(self) -> StopRun | None:
        """Why the run is to stop, or None."""
        return self.callbacks.stop

    def _remember(self, metrics: Metrics) -> None:
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
        return RunResult.of(
            self.state,
            self.history,
            self.directory,
            because="finished" if self.stop is None else self.stop.reason,
            unfinished=not finished,
            fingerprint=self.model.fingerprint,
        )

    def end(self, result: RunResult) -> None:
        """Call the callbacks' on_train_end; raises where the last checkpoint could not be written."""
        with self.world.watch.patiently("finishing"):
            self.callbacks.end(result)
        if self._saver is not None and self._saver.failure is not None:
            raise RunError(
                f"the last checkpoint is missing: {self._saver.failure.message}",
                hint=f"make room, and go on with: whet resume {self.directory}"
                if result.unfinished
                else None,
            )
