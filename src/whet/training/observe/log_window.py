"""Aggregation of the metrics of several steps to one training row."""

import math
from dataclasses import dataclass, field
from typing import Any

WindowMetrics = dict[str, Any]  # Any: numbers, lists of numbers, strings

# the value of the last step: state of the run, and rates that are already means over several steps
_LAST = frozenset(
    (
        *("lr", "loss_scale", "tokens_total", "supervised_tokens_total", "flops_total", "elapsed_s"),
        *("elapsed_ms", "steps_per_s", "mean_tokens_per_s", "tflops_per_s", "mfu", "probe_s"),
    )
)
_TOTALS = frozenset(("tokens", "supervised_tokens", "skipped"))
_MAXIMA = frozenset(("peak_gib", "mismatch_max"))
_WEIGHTED = frozenset(("final_loss",))  # the same loss with another name


@dataclass
class LogWindow:
    """Sums of metrics over the steps since the last training row.

    The loss and the metrics of the objective are averaged over supervised tokens, pairs or texts. Other
    numbers are averaged over steps, and `tokens`, `supervised_tokens` and `skipped` are added up. State of
    the run and values that are not numbers are those of the last step. Non-finite values, which skipped steps
    have, do not count. A row of one step has the metrics of that step.
    """

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: WindowMetrics, *, weight: float, weighted: frozenset[str]) -> None:
        """Add a step whose loss and `weighted` metrics are averaged over `weight` units."""
        self.steps += 1
        for name, value in metrics.items():
            if name in _TOTALS:
                self.sums[name] = self.sums.get(name, 0) + value
            elif type(value) not in (int, float) or name in _LAST or name.startswith("exp_"):
                continue
            elif name in _MAXIMA:
                self.sums[name] = max(self.sums.get(name, -math.inf), value)
            elif math.isfinite(value):
                units = weight if name in weighted or name in _WEIGHTED else 1.0
                self.sums[name] = self.sums.get(name, 0.0) + units * value
                self.weights[name] = self.weights.get(name, 0.0) + units

    def row(self, metrics: WindowMetrics) -> WindowMetrics:
        """Return the training row, given the metrics of its last step."""
        if self.steps == 1:
            return metrics
        means = {
            name: total / self.weights[name] if name in self.weights else total
            for name, total in self.sums.items()
            if self.weights.get(name) != 0
        }
        if {"tokens", "step_s"} <= means.keys():
            means["tokens_per_s"] = means["tokens"] / (means["step_s"] * self.weights["step_s"])
        return {**metrics, **means}
