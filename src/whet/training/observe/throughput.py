"""Throughput in tokens/s and FLOP/s, and model FLOPs utilization (MFU)."""

from collections import deque

from whet.errors import ConfigError
from whet.training.callbacks import Injector, Metrics


class ThroughputMonitor(Injector):
    """Measures throughput over the last `every` steps, including the time between steps but not evaluations.

    Args:
        every: The number of steps to average over.
        flops_per_token: The FLOPs that training takes per token; adds FLOP metrics.
        peak_tflops: The peak TFLOP/s of the device; adds MFU.
    """

    def __init__(
        self, every: int = 10, *, flops_per_token: float | None = None, peak_tflops: float | None = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"ThroughputMonitor: every must be >= 1, not {every}")
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self._steps: deque[tuple[float, int]] = deque(maxlen=every)  # seconds and tokens
        self._last_end: float | None = None

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Exclude the duration of the evaluation."""
        if self._last_end is not None:
            self._last_end += metrics["eval_s"]

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Add steps_per_s, mean_tokens_per_s and, if known, flops_total, tflops_per_s and mfu."""
        now = metrics["elapsed_s"]  # when the device completed the step, which the host may notice late
        duration = metrics["step_s"] if self._last_end is None else now - self._last_end
        self._steps.append((duration, metrics["tokens"]))
        self._last_end = now
        seconds = sum(duration for duration, _ in self._steps)
        tokens = sum(count for _, count in self._steps)
        metrics["steps_per_s"] = len(self._steps) / seconds
        metrics["mean_tokens_per_s"] = tokens / seconds
        if self.flops_per_token is not None:
            metrics["flops_total"] = self.flops_per_token * metrics["tokens_total"]
            metrics["tflops_per_s"] = self.flops_per_token * tokens / seconds / 1e12
            if self.peak_tflops is not None:
                metrics["mfu"] = metrics["tflops_per_s"] / self.peak_tflops
