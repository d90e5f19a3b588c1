"""Limits of a run: memory and time limits stop it with a checkpoint, a spent budget finishes it."""

import time

from whet.errors import ConfigError
from whet.hardware import used_gib
from whet.training.callbacks import Callback, Metrics, RunView, StopRun


class MemoryLimit(Callback):
    """Stops the run with a checkpoint when memory use reaches `limit_gib`, before the machine swaps."""

    def __init__(self, limit_gib: float) -> None:
        self.limit_gib = limit_gib

    def on_train_begin(self, run: RunView) -> StopRun | None:
        """Check the memory of the run's device."""
        self.device = run.device
        return self._check()

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Check the memory after each step."""
        return self._check()

    def _check(self) -> StopRun | None:
        used = used_gib(self.device)
        if used < self.limit_gib:
            return None
        return StopRun(
            f"{used:.2f} GiB of memory in use, run.max_memory is {self.limit_gib:g} GiB", unfinished=True
        )


class TimeLimit(Callback):
    """Stops the run with a checkpoint `minutes` after it was started or resumed."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes

    def on_train_begin(self, run: RunView) -> None:
        """Start the clock."""
        self.deadline = time.monotonic() + self.minutes * 60

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop after the deadline."""
        if time.monotonic() < self.deadline:
            return None
        return StopRun(f"run.max_time of {self.minutes:g} minutes is reached", unfinished=True)


class Budget(Callback):
    """Finishes a run when its steps have spent a budget; the count continues when a run is resumed.

    Args:
        flops: The budget in FLOPs.
        minutes: The budget in minutes.
        flops_per_token: The FLOPs that training takes per token; needed with `flops`.
    """

    def __init__(
        self,
        *,
        flops: float | None = None,
        minutes: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        if flops is not None and flops_per_token is None:
            raise ConfigError("a budget in FLOPs needs flops_per_token")
        self.flops = flops
        self.minutes = minutes
        self.flops_per_token = flops_per_token

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Stop if the budget is spent."""
        if self.flops is not None and self.flops_per_token is not None:
            spent = self.flops_per_token * metrics["tokens_total"]
            if spent >= self.flops:
                return StopRun(f"the budget of {self.flops:.3g} FLOPs is spent")
        if self.minutes is not None and metrics["elapsed_s"] >= self.minutes * 60:
            return StopRun(f"the budget of {self.minutes:g} minutes is spent")
        return None
