"""The one trainer: it drives every objective and knows none of them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from whet.config.sections import RunConfig
from whet.data.batches import Batch
from whet.errors import RunError
from whet.hardware import Precision, choose_precision, peak_gib
from whet.models.language_model import LanguageModel
from whet.objectives.base import Objective
from whet.storage import write_json
from whet.training.callbacks import Callback, Metrics, StopRun, in_order, is_better
from whet.training.checkpoint import (
    checkpoint_path,
    load_checkpoint,
    prune,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from whet.training.evaluation import evaluate_loss, total_weights, weighted_loss
from whet.training.optimizers import create_optimizer, masked_step
from whet.training.schedules import create_schedule

log = logging.getLogger("whet")


@dataclass
class RunState:
    """Where a run is, apart from its tensors and its data position."""

    step: int = 0
    tokens_total: int = 0
    elapsed_s: float = 0.0
    best: dict[str, Any] | None = None  # Any: metric's name, its value, its step
    evaluated_step: int | None = None  # where the last evaluation was
    stopped: str | None = None  # why it is over before its last step, if a callback said so


@dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    directory: Path | None
    steps: int
    metrics: Metrics  # the last training and evaluation numbers
    best: dict[str, Any] | None  # Any: metric's name, its value, its step
    history: list[Metrics]
    stopped_because: str
    unfinished: bool  # there was more to do: whet resume goes on
    summary: Metrics = field(default_factory=dict)


class Trainer:
    """Steps a model through batches towards an objective.

    `batches` yields, for each optimizer step, the list of its micro-batches. `evaluators` add their own
    numbers (exact match, say) to the loss on `eval_batches`.
    """

    def __init__(
        self,
        model: LanguageModel,
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
    ) -> None:
        steps = total_steps or config.run.steps
        if steps is None:
            raise RunError("a trainer needs total_steps when the config counts epochs")
        self.model = model
        self.objective = objective
        self.source = batches
        self.batches: Iterator[list[Batch]] = iter(batches)
        self.config = config
        self.callbacks = in_order(callbacks)
        self.total_steps = steps
        self.eval_batches = eval_batches
        self.evaluators = evaluators
        self.directory = None if directory is None else Path(directory)
        self.device = model.device
        self.precision = precision or choose_precision(config.run.precision, self.device)
        self.optimizer = create_optimizer(config.optim_groups, model)
        self.lr_at = create_schedule(config.optim, self.total_steps)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.state = RunState()
        self.history: list[Metrics] = []
        self.stop: StopRun | None = None
        self._clock = time.perf_counter()
        self._saved_step: int | None = None
        self._step_began_at: dict[str, int] | None = None

    def fit(self) -> RunResult:
        """Run to the end, or to wherever a callback stops it."""
        self._clock = time.perf_counter() - self.state.elapsed_s
        self._tell("on_train_begin", self)
        self._evaluate_if_due()
        while self.state.step < self.total_steps and self.stop is None:
            metrics = self.step(self._next_batches())
            self._tell("on_step_end", self.state.step, metrics)
            self.history.append({"step": self.state.step, **metrics})
            self._evaluate_if_due()
            if self._due(self.config.checkpoint.every):
                self.save()
        return self._finish()

    def step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """One update from all micro-batches: sums over them, divided once by the weights of all of them."""
        started = time.perf_counter()
        self.model.train()
        weights = total_weights(self.objective, micro_batches)
        sums = {"loss": torch.zeros((), device=self.device)}
        for batch in micro_batches:
            share, metrics = weighted_loss(
                self.model, self.objective, batch.to(self.device), weights=weights, precision=self.precision
            )
            share.backward()
            for name, value in {"loss": share.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        if self.config.optim.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.trained, self.config.optim.clip, norm)
        lr = self.lr_at(self.state.step + 1)
        skip = (~(norm.isfinite() & sums["loss"].isfinite())).float()
        masked_step(self.optimizer, lr=lr, skip=skip)
        # the first read of device numbers: everything above was queued without waiting
        skipped, norm_value, *values = torch.stack((skip, norm.float(), *sums.values())).tolist()
        found: Metrics = dict(zip(sums, values, strict=True))
        if skipped:
            self._report_nonfinite(micro_batches, found["loss"], norm_value)
            found["skipped"] = True
        self.state.step += 1
        self.state.tokens_total += (tokens := sum(batch.real_tokens for batch in micro_batches))
        self.state.elapsed_s = (now := time.perf_counter()) - self._clock
        return {
            **found,
            "lr": lr,
            "grad_norm": norm_value,
            "tokens": tokens,
            "supervised_tokens": sum(batch.supervised for batch in micro_batches),
            "tokens_total": self.state.tokens_total,
            "tokens_per_s": tokens / (now - started),
            "step_s": now - started,
            "elapsed_s": self.state.elapsed_s,
            "peak_gib": peak_gib(self.device),
        }

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Loss over batches, weighted by tokens, and its perplexity."""
        return evaluate_loss(self.model, self.objective, batches, precision=self.precision)

    def save(self) -> Path | None:
        """Write a checkpoint of this step, once; a run without a directory has none."""
        if self.directory is None:
            return None
        path = checkpoint_path(self.directory, self.state.step)
        if self._saved_step != self.state.step:
            save_checkpoint(path, self.model, self.optimizer, self.state.step, self._run_state())
            self._saved_step = self.state.step
            best_step = self.state.best["step"] if self.state.best else None
            prune(self.directory, keep=self.config.checkpoint.keep, best_step=best_step)
            self._tell("on_save", self.state.step, path)
        return path

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint: everything the run needs, or an error."""
        state = load_checkpoint(path, self.model, self.optimizer)
        self.state = RunState(**state["run"])
        self._saved_step = self.state.step
        self.stop = None if self.state.stopped is None else StopRun(self.state.stopped)
        restore_random_state(state["random"])
        self.source.seek(state["data"])  # type: ignore[attr-defined]  # a stream that was saved can seek
        for name, callback in self._named_callbacks():
            if name in state["callbacks"]:
                callback.restore(state["callbacks"][name])

    def _run_state(self) -> Metrics:
        return {
            "run": asdict(self.state),
            "random": random_state(),
            "data": self.source.state() if hasattr(self.source, "state") else {},
            "callbacks": {name: state for name, c in self._named_callbacks() if (state := c.state())},
        }

    def _named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Callbacks under names that a resumed run gives them, too: their class, numbered."""
        seen: Counter[str] = Counter()
        for callback in self.callbacks:
            kind = type(callback).__name__
            yield f"{kind}-{seen[kind]}", callback
            seen[kind] += 1

    def _next_batches(self) -> list[Batch]:
        """The micro-batches of the next step."""
        if hasattr(self.source, "state"):
            self._step_began_at = self.source.state()
        try:
            return next(self.batches)
        except StopIteration:
            raise RunError(
                f"the batches ran out after step {self.state.step} of {self.total_steps}",
                hint="batches must yield one list of micro-batches for each step",
            ) from None

    def _due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _evaluate_if_due(self) -> None:
        """Before the first step and at intervals; a run that must stop now does it when it is resumed."""
        hurry = self.stop is not None and self.stop.unfinished
        if not hurry and (self.state.step == 0 or self._due(self.config.eval.every)):
            self._evaluate_and_tell()

    def _evaluate_and_tell(self) -> None:
        """Evaluate, once a step, tell the callbacks, and keep a checkpoint when it is the best so far."""
        if not self.eval_batches or self.state.evaluated_step == self.state.step:
            return
        started = time.perf_counter()
        metrics = self.evaluate(self.eval_batches)
        for evaluator in self.evaluators:
            metrics |= evaluator()
        metrics["eval_s"] = time.perf_counter() - started
        self.state.evaluated_step = self.state.step
        self._tell("on_eval_end", self.state.step, metrics)
        self.history.append({"step": self.state.step, **metrics})
        early = self.config.eval.early_stop
        watched = early.metric if early is not None else "eval_loss"
        best = self.state.best
        if watched in metrics and is_better(watched, metrics[watched], best["value"] if best else None):
            self.state.best = {"metric": watched, "value": metrics[watched], "step": self.state.step}
            if self.state.step or early is not None:  # nobody asks for untouched weights back otherwise
                self.save()

    def _tell(self, hook: str, *arguments: Any) -> None:  # Any: what the hook takes
        for callback in self.callbacks:
            answer = getattr(callback, hook)(*arguments)
            if isinstance(answer, StopRun) and self.stop is None:
                self.stop = answer
                self.state.stopped = None if answer.unfinished else answer.reason
                log.info("stopping: %s", answer.reason)

    def _report_nonfinite(self, micro_batches: Sequence[Batch], loss: float, norm: float) -> None:
        """The weights did not change; keep what is needed to find out why, and stop or go on."""
        step = self.state.step + 1
        where = ""
        if self.directory is not None:
            path = self.directory / f"nonfinite-step-{step:06d}.json"
            culprits = [
                {"records": batch.origins, "tokens": batch.tokens.tolist()} for batch in micro_batches
            ]
            write_json(path, {"loss": str(loss), "grad_norm": str(norm), "micro_batches": culprits})
            where = f"; the batch is in {path}"
        message = f"step {step}: loss {loss}, gradient norm {norm}: the weights were left as they were{where}"
        if self.config.run.on_nonfinite == "skip":
            log.warning(message)
            return
        if self._step_began_at is not None:
            self.source.seek(self._step_began_at)  # type: ignore[attr-defined]  # it has a state, so it can seek
        self.save()
        raise RunError(message, hint="lower optim.lr, look at the records, or set run.on_nonfinite to skip")

    def _finish(self) -> RunResult:
        finished = self.stop is None or not self.stop.unfinished or self.state.step == self.total_steps
        if finished:
            self._evaluate_and_tell()
        self.save()
        if (
            finished
            and self.config.eval.early_stop is not None
            and self.directory is not None
            and self.state.best
        ):
            load_checkpoint(checkpoint_path(self.directory, self.state.best["step"]), self.model)
            log.info("the weights are those of step %(step)d, the best by %(metric)s", self.state.best)
        latest: Metrics = {}
        for row in self.history:
            latest |= row
        result = RunResult(
            directory=self.directory,
            steps=self.state.step,
            metrics=latest,
            best=self.state.best,
            history=self.history,
            stopped_because="finished" if self.stop is None else self.stop.reason,
            unfinished=not finished,
            summary={
                "steps": self.state.step,
                "tokens": self.state.tokens_total,
                "seconds": self.state.elapsed_s,
                "stopped_because": "finished" if self.stop is None else self.stop.reason,
                "final": latest,
                "best": self.state.best,
                "directory": str(self.directory) if self.directory else None,
                "fingerprint": self.model.fingerprint,
            },
        )
        self._tell("on_train_end", result)
        return result
