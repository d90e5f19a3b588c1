"""What a training row says of the steps since the row before it."""

import math
from dataclasses import dataclass, field
from typing import Any

WindowMetrics = dict[str, Any]  # Any: numbers, lists of numbers, texts

# of the last step: the state of the run, and rates that are means over several steps already
_LAST = frozenset(
    (
        *("lr", "loss_scale", "tokens_total", "supervised_tokens_total", "flops_total", "elapsed_s"),
        *("elapsed_ms", "steps_per_s", "mean_tokens_per_s", "tflops_per_s", "mfu", "probe_s"),
    )
)
_TOTALS = frozenset(("tokens", "supervised_tokens", "skipped"))
_LARGEST = frozenset(("peak_gib", "mismatch_max"))
_WEIGHTED = frozenset(("final_loss",))  # the loss under another name


@dataclass
class LogWindow:
    """Sums over the steps since the last row.

    A row has the mean of the loss and of the objective's other metrics, weighted by what each step's loss is
    a mean over (its supervised tokens, pairs or texts), the plain mean of other numbers, totals of `tokens`,
    `supervised_tokens` and `skipped`, and the last step's value of everything that is not a number or is a
    state of the run. Values that are not finite (of skipped steps) are left out of means. A row of one step
    is the step's.
    """

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: WindowMetrics, *, weight: float, weighted: frozenset[str]) -> None:
        """Add a step, whose loss is a mean over `weight` units, as are all metrics that are `weighted`."""
        self.steps += 1
        for name, value in metrics.items():
            if name in _TOTALS:
                self.sums[name] = self.sums.get(name, 0) + value
            elif type(value) not in (int, float) or name in _LAST or name.startswith("exp_"):
                continue
            elif name in _LARGEST:
                self.sums[name] = max(self.sums.get(name, -math.inf), value)
            elif math.isfinite(value):
                units = weight if name in weighted or name in _WEIGHTED else 1.0
                self.sums[name] = self.sums.get(name, 0.0) + units * value
                self.weights[name] = self.weights.get(name, 0.0) + units

    def row(self, metrics: WindowMetrics) -> WindowMetrics:
        """Return the row, whose last step has these metrics."""
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
