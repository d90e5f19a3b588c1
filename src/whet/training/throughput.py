"""How fast a run goes, how much of the device it uses, and when it has cost enough."""

from collections import deque

from whet.errors import ConfigError
from whet.training.callbacks import Injector, Metrics, NumbersOnly, StopRun


class ThroughputMonitor(Injector, NumbersOnly):
    """Rates over the last `every` steps, with everything that happens between them but evaluations.

    With `flops_per_token`, what training takes for one, it also counts FLOPs; with the device's `peak_tflops`
    it says what share of them is used.
    """

    def __init__(
        self, every: int = 10, *, flops_per_token: float | None = None, peak_tflops: float | None = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"a throughput over the last {every} steps is none", hint="every is at least 1")
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self._steps: deque[tuple[float, int]] = deque(maxlen=every)  # seconds and tokens of each
        self._since: float | None = None

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """An evaluation is no training."""
        if self._since is not None:
            self._since += metrics["eval_s"]

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """steps_per_s, mean_tokens_per_s, and where they are known flops_total, tflops_per_s and mfu."""
        now = metrics["elapsed_s"]  # when the device was done; the host may know late
        taken = metrics["step_s"] if self._since is None else now - self._since
        self._steps.append((taken, metrics["tokens"]))
        self._since = now
        seconds = sum(taken for taken, _ in self._steps)
        tokens = sum(count for _, count in self._steps)
        metrics["steps_per_s"] = len(self._steps) / seconds
        metrics["mean_tokens_per_s"] = tokens / seconds
        if self.flops_per_token is not None:
            metrics["flops_total"] = self.flops_per_token * metrics["tokens_total"]
            metrics["tflops_per_s"] = self.flops_per_token * tokens / seconds / 1e12
            if self.peak_tflops is not None:
                metrics["mfu"] = metrics["tflops_per_s"] / self.peak_tflops


class Budget(NumbersOnly):
    """Ends a run, as finished, when its steps together have cost enough; resumed ones go on counting."""

    def __init__(
        self,
        *,
        flops: float | None = None,
        minutes: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        if flops is not None and flops_per_token is None:
            raise ConfigError("a budget of FLOPs needs to know how many a token takes")
        self.flops = flops
        self.minutes = minutes
        self.flops_per_token = flops_per_token

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Add up."""
        if self.flops is not None and self.flops_per_token is not None:
            spent = self.flops_per_token * metrics["tokens_total"]
            if spent >= self.flops:
                return StopRun(f"the budget of {self.flops:.3g} FLOPs is spent")
        if self.minutes is not None and metrics["elapsed_s"] >= self.minutes * 60:
            return StopRun(f"the budget of {self.minutes:g} minutes is spent")
        return None
