"""The state of a run that checkpoints store, and the result of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.data.batches import Batch
from whet.training.callbacks import Metrics
from whet.training.grad_scaler import LossScale


@dataclass
class RunState:
    """Counters, best metric and latest metrics of a run; everything but its tensors and data position."""

    step: int = 0
    tokens_total: int = 0
    supervised_tokens_total: int | None = 0  # None: started by a version that did not count them
    peak_gib: float = 0.0  # over all parts of a resumed run
    elapsed_s: float = 0.0
    best: dict[str, Any] | None = None  # Any: metric name, value and step
    best_steps: list[int] = field(default_factory=list)  # the best step, after those that were best earlier
    evaluated_step: int | None = None  # step of the last evaluation
    latest: Metrics = field(default_factory=dict)  # the last value of every metric
    nonfinite_in_a_row: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, dict):  # from a checkpoint
            self.loss_scale = LossScale(**self.loss_scale)
        self.peak_gib = max(self.peak_gib, self.latest.get("peak_gib", 0.0))
        if self.best is not None and not self.best_steps:  # from a version that did not store them
            self.best_steps = [self.best["step"]]

    stopped: str | None = None  # why a callback ended the run before its last step

    @classmethod
    def from_checkpoint(cls, state: dict[str, Any]) -> "RunState":  # Any: JSON values
        """Return the state stored in a checkpoint of this or an older version."""
        return cls(**{"supervised_tokens_total": None, **state})

    def step_metrics(
        self,
        micro_batches: Sequence[Batch],
        metrics: Metrics,
        *,
        lr: float,
        norm: float,
        seconds: float,
        peak_gib: float,
    ) -> Metrics:
        """Add a step's tokens and peak memory to the totals, and return the step's metrics row.

        Args:
            micro_batches: The micro-batches of the step.
            metrics: The loss and the metrics of the objective.
            lr: The learning rate of the step.
            norm: The gradient norm before clipping.
            seconds: The duration of the step.
            peak_gib: The peak memory of this process so far.
        """
        tokens = sum(batch.real_tokens for batch in micro_batches)
        supervised = sum(batch.supervised for batch in micro_batches)
        return {
            **metrics,
            "lr": lr,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": supervised,
            **self.count_tokens(tokens, supervised),
            "tokens_per_s": tokens / seconds,
            "step_s": seconds,
            "elapsed_s": self.elapsed_s,
            "peak_gib": self.update_peak(peak_gib),
        }

    def count_step(self, *, skipped: bool) -> None:
        """Count a step, and the consecutive steps whose update was skipped."""
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if skipped else 0
        self.step += 1

    def count_tokens(self, tokens: int, supervised: int) -> Metrics:
        """Add the tokens of a step to the totals, and return the totals."""
        self.tokens_total += tokens
        if self.supervised_tokens_total is None:
            return {"tokens_total": self.tokens_total}
        self.supervised_tokens_total += supervised
        return {
            "tokens_total": self.tokens_total,
            "supervised_tokens_total": self.supervised_tokens_total,
        }

    def update_peak(self, gib: float) -> float:
        """Return the peak memory over all parts of the run, given that of this process."""
        self.peak_gib = max(self.peak_gib, gib)
        return self.peak_gib

    def summary(self, because: str) -> Metrics:
        """Return the summary written as the last entry of metrics.jsonl."""
        return {
            "steps": self.step,
            "tokens": self.tokens_total,
            "seconds": self.elapsed_s,
            "stopped_because": because,
            "final": self.latest,
            "best": self.best,
        }


@dataclass(frozen=True)
class RunResult:
    """The result of a run: where it ended, why, and with which metrics."""

    directory: Path | None
    steps: int
    metrics: Metrics  # the last training and evaluation metrics
    best: dict[str, Any] | None  # Any: metric name, value and step
    history: list[Metrics]
    stopped_because: str
    unfinished: bool  # steps remain, and whet resume continues the run
    summary: Metrics = field(default_factory=dict)

    @classmethod
    def from_state(
        cls,
        state: RunState,
        history: list[Metrics],
        directory: Path | None,
        *,
        because: str,
        unfinished: bool,
        fingerprint: str,
    ) -> "RunResult":
        """Return the result of a run that ended in `state`."""
        identity = {"directory": str(directory) if directory else None, "fingerprint": fingerprint}
        return cls(
            directory=directory,
            steps=state.step,
            metrics=state.latest,
            best=state.best,
            history=history,
            stopped_because=because,
            unfinished=unfinished,
            summary=state.summary(because) | identity,
        )
