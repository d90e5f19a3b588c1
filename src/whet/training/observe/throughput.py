"""Tokens per second, FLOPs and model FLOPs utilisation of each step."""

from collections import deque

from whet.errors import ConfigError
from whet.training.callbacks import Injector, Metrics


class ThroughputMonitor(Injector):
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
