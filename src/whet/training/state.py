"""Where a run is, and what it came to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.training.callbacks import Metrics
from whet.training.grad_scaler import LossScale


@dataclass
class RunState:
    """Where a run is, apart from its tensors and its data position."""

    step: int = 0
    tokens_total: int = 0
    supervised_tokens_total: int | None = 0  # None: begun by a version that did not count them
    peak_gib: float = 0.0  # the most memory any part of the run has used
    elapsed_s: float = 0.0
    best: dict[str, Any] | None = None  # Any: metric's name, its value, its step
    best_steps: list[int] = field(default_factory=list)  # that one and those that were the best before it
    evaluated_step: int | None = None  # where the last evaluation was
    latest: Metrics = field(default_factory=dict)  # the last number of each kind
    nonfinite_in_a_row: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, dict):  # from a checkpoint
            self.loss_scale = LossScale(**self.loss_scale)
        self.peak_gib = max(self.peak_gib, self.latest.get("peak_gib", 0.0))
        if self.best is not None and not self.best_steps:  # of a version that did not keep them
            self.best_steps = [self.best["step"]]

    stopped: str | None = None  # why it is over before its last step, if a callback said so

    @classmethod
    def from_checkpoint(cls, state: dict[str, Any]) -> "RunState":  # Any: JSON values
        """Return the state that a checkpoint of this version or an older one holds."""
        return cls(**{"supervised_tokens_total": None, **state})

    def count(self, tokens: int, supervised: int) -> Metrics:
        """Add the tokens of a step, and return the totals."""
        self.tokens_total += tokens
        if self.supervised_tokens_total is None:
            return {"tokens_total": self.tokens_total}
        self.supervised_tokens_total += supervised
        return {
            "tokens_total": self.tokens_total,
            "supervised_tokens_total": self.supervised_tokens_total,
        }

    def peak(self, gib: float) -> float:
        """Return the peak of memory so far, over all parts of the run."""
        self.peak_gib = max(self.peak_gib, gib)
        return self.peak_gib

    def summary(self, because: str) -> Metrics:
        """What the last line of a run says of it."""
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
    """What a run came to."""

    directory: Path | None
    steps: int
    metrics: Metrics  # the last training and evaluation numbers
    best: dict[str, Any] | None  # Any: metric's name, its value, its step
    history: list[Metrics]
    stopped_because: str
    unfinished: bool  # there was more to do: whet resume goes on
    summary: Metrics = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: RunState,
        history: list[Metrics],
        directory: Path | None,
        *,
        because: str,
        unfinished: bool,
        fingerprint: str,
    ) -> "RunResult":
        """Return the result of a run that ends in this state."""
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
