"""Early stopping: compare metric values, stop without improvement, and restore the best weights."""

import logging
import math
from pathlib import Path
from typing import Any

from torch import nn

from whet.config.metric_direction import lower_is_better
from whet.errors import CheckpointError, ConfigError, check_positive
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.training.callbacks import Callback, Metrics, StopRun
from whet.training.checkpoint import checkpoint_path, load_checkpoint
from whet.training.state import RunState

log = logging.getLogger("whet")


class EarlyStopping(Callback):
    """Stops the run when an evaluation metric has not improved for `patience` evaluations.

    Args:
        metric: The metric to watch. Its name decides whether lower or higher is better.
        patience: The number of evaluations without improvement after which the run stops.
        min_delta: The smallest change that counts as an improvement.
    """

    state_key = "early-stopping"

    def __init__(self, metric: str = "eval_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        check_positive(patience=patience)
        if not min_delta >= 0:
            raise ConfigError(f"min_delta must be >= 0, not {min_delta:g}")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.without_improvement = 0

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Compare the metric with the best so far, and stop if it has not improved for long enough.

        Evaluations without the metric do not count, if it was seen before: tasks may have a longer interval.
        """
        if self.metric not in metrics and self.best is not None:
            return None
        if not isinstance(metrics.get(self.metric), int | float):
            known = ", ".join(name for name, value in metrics.items() if isinstance(value, int | float))
            raise ConfigError(
                f"early stopping: evaluations have no metric {self.metric!r} (available: {known})"
            )
        value = metrics[self.metric]
        if is_better(self.metric, value, self.best, min_delta=self.min_delta):
            self.best, self.without_improvement = value, 0
            return None
        self.without_improvement += 1
        if self.without_improvement < self.patience:
            return None
        return StopRun(
            f"{self.metric} has not improved on {self.best} for {self.patience} evaluations (step {step})"
        )

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the best value and the number of evaluations since."""
        return {"best": self.best, "without_improvement": self.without_improvement}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore what `state` returned."""
        self.best, self.without_improvement = state["best"], state["without_improvement"]


def is_better(metric: str, value: float, best: float | None, *, min_delta: float = 0.0) -> bool:
    """Return whether a metric value improves on the best one by more than `min_delta`; NaN never does."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if lower_is_better(metric) else value > best + min_delta


def note_best(state: RunState, metrics: Metrics, metric: str | None) -> bool:
    """Record an evaluation if it is the best of the run so far, and return whether it is.

    Evaluations are compared by `metric`, or by eval_loss, or by eval_reward if there is no loss.
    """
    watched = metric or ("eval_loss" if "eval_loss" in metrics else "eval_reward")
    before = None if state.best is None else state.best["value"]
    if watched not in metrics or not is_better(watched, metrics[watched], before):
        return False
    state.best = {"metric": watched, "value": metrics[watched], "step": state.step}
    state.best_steps.append(state.step)
    return True


def restore_best_weights(
    directory: Path, module: nn.Module, state: RunState, *, world: World = SINGLE_PROCESS
) -> None:
    """Load the weights of the best step whose checkpoint is valid into a module."""
    if not state.best:
        return
    best, problem = state.best, "its checkpoint does not exist"
    for step in reversed(state.best_steps):
        path = checkpoint_path(directory, step)
        if not path.is_dir():  # saving it failed, or a better one replaced it
            continue
        try:
            load_checkpoint(path, module, world=world)
        except CheckpointError as error:
            problem = error.message
            continue
        if step == best["step"]:
            log.info("restored the weights of step %(step)d, the best by %(metric)s", best)
        else:
            log.warning(
                "the weights of step %d, the best by %s, cannot be restored; using those of step %d, the "
                "best before it",
                *(best["step"], best["metric"], step),
            )
        return
    log.warning("the best weights cannot be restored, using the last ones: %s", problem)
