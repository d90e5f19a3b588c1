"""The one trainer: it drives every objective and knows none of them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.config.load import to_dict
from whet.config.sections import RunConfig
from whet.data.batches import Batch
from whet.errors import CheckpointError, RunError
from whet.hardware import Precision, choose_precision, peak_gib
from whet.models.heads import WithHeads
from whet.models.trainable import Trainable
from whet.objectives.base import Objective
from whet.parallel.gradients import GradientSum, clip, is_sharded, rescale, total_norm
from whet.parallel.group import SOLO, World
from whet.training.callbacks import (
    Callback,
    EvaluationStoppedError,
    Metrics,
    StopRun,
    in_order,
    is_better,
    named,
)
from whet.training.checkpoint import (
    checkpoint_path,
    contents_of,
    load_checkpoint,
    random_state,
    restore_random_state,
)
from whet.training.evaluation import evaluate_loss, read_together, taken, total_weights, weighted_loss
from whet.training.nonfinite import keep_batch
from whet.training.optimizers import create_optimizer, masked_step
from whet.training.saving import Saver
from whet.training.schedules import create_schedule
from whet.training.state import RunResult, RunState

log = logging.getLogger("whet")


class Trainer:
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
        steps = total_steps or config.run.steps
        if steps is None:
            raise RunError("a trainer needs total_steps when the config counts epochs")
        self.model = model
        self.objective = objective
        self.source = batches
        self.batches: Iterator[list[Batch]] = iter(batches)
        self.config = config
        self.world = world
        self.callbacks = in_order(c for c in callbacks if world.is_main or not c.main_only)
        self.total_steps = steps
        self.eval_batches = eval_batches
        self.evaluators = evaluators
        self.directory = None if directory is None else Path(directory)
        self.device = model.device
        self.precision = precision or choose_precision(config.run.precision, self.device)
        heads = getattr(objective, "heads", None)
        self.learner: nn.Module = model if heads is None else WithHeads(model, heads)
        self.optimizer = create_optimizer(config.optim_groups, self.learner)
        self.lr_at = create_schedule(config.optim, self.total_steps)
        self.trained = [p for p in self.learner.parameters() if p.requires_grad]
        self.gradients = GradientSum(self.trained, world)
        self.matched = is_sharded(self.learner)
        self.state = RunState()
        if self.precision.compute == torch.float16:
            self.state.loss_scale.value = 2.0**16
        self.history: list[Metrics] = []
        self.stop: StopRun | None = None
        self._clock = time.perf_counter()
        self._saver = None if self.directory is None else Saver(self.directory, config.checkpoint, world)
        self._step_began_at: dict[str, Any] | None = None

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
            metrics = self.step(self._next_batches())
            self._tell("on_step_end", self.state.step, metrics)
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

    def step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """One update from all micro-batches: sums over them, divided once by the weights of all of them."""
        started = time.perf_counter()
        lr, scale = self.lr_at(self.state.step + 1), self.state.loss_scale
        scale_before = scale.value
        found, norm, skipped = self._update(micro_batches, lr=lr)
        while skipped and scale.shrink_after(found["loss"]):  # an overflow of fp16: the same again, smaller
            found, norm, skipped = self._update(micro_batches, lr=lr)
        if skipped:
            scale.value = scale_before  # it was not to blame
            self._report_nonfinite(micro_batches, found["loss"], norm)
            found["skipped"] = True
        else:
            scale.note_good_step()
        if self.precision.compute == torch.float16:
            found["loss_scale"] = scale.value
        self.state.nonfinite_in_a_row = self.state.nonfinite_in_a_row + 1 if skipped else 0
        self.state.step += 1
        self.world.watch.at_step(self.state.step)
        self.state.tokens_total += (tokens := sum(batch.real_tokens for batch in micro_batches))
        self.state.elapsed_s = (now := time.perf_counter()) - self._clock
        return {
            **found,
            "lr": lr,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": sum(batch.supervised for batch in micro_batches),
            "tokens_total": self.state.tokens_total,
            "tokens_per_s": tokens / (now - started),
            "step_s": now - started,
            "elapsed_s": self.state.elapsed_s,
            "peak_gib": peak_gib(self.device),
        }

    def _update(self, micro_batches: Sequence[Batch], *, lr: float) -> tuple[Metrics, float, bool]:
        """Forward, backward, and an update unless something is not finite: metrics, norm, and whether not."""
        self.learner.train()
        scale = self.state.loss_scale.value
        weights = total_weights(self.objective, micro_batches)
        sums = {"loss": torch.zeros((), device=self.device)}
        mine = list(taken(self.world, micro_batches, matched=self.matched))
        exchanging = "gathering layers and adding up gradients" if self.matched else None
        for number, (_, batch, counts) in enumerate(mine, start=1):
            self.world.watch.doing(f"micro-batch {number} of {len(mine)}", exchanging=exchanging)
            share, metrics = weighted_loss(
                self.model, self.objective, batch.to(self.device), weights=weights, precision=self.precision
            )
            if number == len(mine):
                self.gradients.expect_last()
            (share * scale if counts else share * 0.0).backward()
            if not counts:
                continue
            for name, value in {"loss": share.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        self.gradients.finish()
        gradients = [p.grad for p in self.trained if p.grad is not None]
        rescale(gradients, 1.0 / scale)
        norm = total_norm(gradients)
        if self.config.optim.clip is not None:
            clip(self.trained, self.config.optim.clip, norm)
        skip = (~(norm.isfinite() & self.world.add_up(sums["loss"]).isfinite())).float()
        if self._saver is not None:
            self._saver.before_update()
        masked_step(self.optimizer, lr=lr, skip=skip)
        # the first read of device numbers: everything above was queued without waiting
        skipped, norm_value, *values = read_together(skip, norm, *sums.values())
        return self.world.sums(dict(zip(sums, values, strict=True))), norm_value, bool(skipped)

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
            if (answer := callback.on_pause()) is not None:
                self._obey(answer)
                raise EvaluationStoppedError

    def save(self) -> None:
        """Save a checkpoint of this step, once; a run without a directory has none.

        It may still be copied from the model when this returns; `step` waits for that before it updates.
        """
        if self._saver is None or self.world.from_main(self._saver.saved_step == self.state.step):
            return
        contents = contents_of(self.learner, self.optimizer, self.state.step, self._run_state())
        best_step = self.state.best["step"] if self.state.best else None
        with self.world.watch.patiently("saving"):
            self._saver.save(self.state.step, contents, best_step=best_step)

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
        state = load_checkpoint(path, self.learner, self.optimizer)
        self.state = RunState(**state["run"])
        if self._saver is not None:
            self._saver.saved_step = self.state.step
        self.stop = None if self.state.stopped is None else StopRun(self.state.stopped)
        streams = [state["random"], *state.get("random_elsewhere", ())]
        if self.world.rank < len(streams):  # else: one of more ranks than before, seeded as such
            restore_random_state(streams[self.world.rank])
        self.source.seek(state["data"])  # type: ignore[attr-defined]  # a stream that was saved can seek
        for name, callback in named(self.callbacks):
            if name in state["callbacks"]:
                callback.restore(state["callbacks"][name])

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

    def _next_batches(self) -> list[Batch]:
        """The micro-batches of the next step."""
        if hasattr(self.source, "state"):
            self._step_began_at = self.source.state()
        try:
            with self.world.watch.patiently("preparing a step"):  # an epoch's order, or rollouts
                return next(self.batches)
        except StopIteration:
            raise RunError(
                f"the batches ran out after step {self.state.step} of {self.total_steps}",
                hint="batches must yield one list of micro-batches for each step",
            ) from None

    def _evaluate_if_due(self) -> None:
        """Before the first step and at intervals; a run that must stop now does it when it is resumed."""
        hurry, every = self.stop is not None and self.stop.unfinished, self.config.eval.every
        if not hurry and (self.state.step == 0 or (every is not None and self.state.step % every == 0)):
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
        self._tell("on_eval_end", self.state.step, metrics)
        self._remember(metrics)
        self._agree_on_stop()
        early = self.config.eval.early_stop
        usual = "eval_loss" if "eval_loss" in metrics else "eval_reward"
        watched = early.metric if early is not None else usual
        best = self.state.best
        if watched in metrics and is_better(watched, metrics[watched], best["value"] if best else None):
            self.state.best = {"metric": watched, "value": metrics[watched], "step": self.state.step}
            if self.state.step or early is not None:  # nobody asks for untouched weights back otherwise
                self.save()

    @property
    def _evaluates(self) -> bool:
        return bool(self.eval_batches or self.evaluators)

    def _remember(self, metrics: Metrics) -> None:
        row = {"step": self.state.step, **metrics}
        self.history.append(row)
        self.state.latest |= row

    def _tell(self, hook: str, *arguments: Any) -> None:  # Any: what the hook takes
        for callback in self.callbacks:
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
        for rank, stop in enumerate(self.world.gather(self.stop) if self.world.size > 1 else ()):
            if stop is not None:
                if self.stop is None:
                    log.info("stopping: rank %d: %s", rank, stop.reason)
                self.stop = stop
                self.state.stopped = None if stop.unfinished else stop.reason
                return

    def _report_nonfinite(self, micro_batches: Sequence[Batch], loss: float, norm: float) -> None:
        """The weights did not change; keep what is needed to find out why, and stop or go on."""
        step = self.state.step + 1
        message = f"step {step}: loss {loss}, gradient norm {norm}: the weights were left as they were"
        if self.directory is not None and self.world.is_main:
            message += f"; {keep_batch(self.directory, step, micro_batches, loss=loss, norm=norm)}"
        run = self.config.run
        in_a_row = self.state.nonfinite_in_a_row + 1
        if run.on_nonfinite == "skip" and in_a_row < run.nonfinite_limit:
            log.warning(message)
            return
        if run.on_nonfinite == "skip":
            message += f"; {in_a_row} such steps in a row, and run.nonfinite_limit is {run.nonfinite_limit}"
        if self._step_began_at is not None:
            self.source.seek(self._step_began_at)  # type: ignore[attr-defined]  # it has a state, so it can seek
        self.save()
        raise RunError(
            message,
            hint="look at the records, set run.on_nonfinite to skip, or start anew with a lower optim.lr",
        )

    def _finish(self) -> RunResult:
        finished = self.stop is None or not self.stop.unfinished or self.state.step == self.total_steps
        if finished:
            self._evaluate_and_tell()
            finished = not self._evaluates or self.state.evaluated_step == self.state.step
        self.save()
        self._wait_for_save()
        self.world.barrier()
        if finished:
            self._take_best_weights()
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

    def _take_best_weights(self) -> None:
        """With early stopping, a finished run has the weights of its best step."""
        if self.config.eval.early_stop is None or self.directory is None or not self.state.best:
            return
        try:
            load_checkpoint(checkpoint_path(self.directory, self.state.best["step"]), self.learner)
        except CheckpointError as error:
            log.warning("the best weights are lost, and the last ones are used: %s", error.message)
        else:
            log.info("the weights are those of step %(step)d, the best by %(metric)s", self.state.best)
