"""Early stopping: which of two metric values is better, when to stop, and the best weights put back."""

import logging
import math
from pathlib import Path
from typing import Any

from torch import nn

from whet.config.metric_direction import falls
from whet.errors import CheckpointError, ConfigError, check_positive
from whet.parallel.process_group import SOLO, World
from whet.training.callbacks import Callback, Metrics, StopRun
from whet.training.checkpoint import checkpoint_path, load_checkpoint
from whet.training.state import RunState

log = logging.getLogger("whet")


class EarlyStopping(Callback):
    """Stops when an evaluation metric has not improved for `patience` evaluations."""

    state_key = "early-stopping"

    def __init__(self, metric: str = "eval_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        check_positive(patience=patience)
        if not min_delta >= 0:
            raise ConfigError(f"min_delta must not be negative, and is {min_delta:g}")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.without_improvement = 0

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Compare with the best so far."""
        if not isinstance(metrics.get(self.metric), int | float):
            known = ", ".join(name for name, value in metrics.items() if isinstance(value, int | float))
            raise ConfigError(f"early stopping watches {self.metric!r}, which no evaluation gives ({known})")
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
        """What a resumed run needs to go on counting."""
        return {"best": self.best, "without_improvement": self.without_improvement}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Go on from `state`."""
        self.best, self.without_improvement = state["best"], state["without_improvement"]


def is_better(metric: str, value: float, best: float | None, *, min_delta: float = 0.0) -> bool:
    """Which way it goes says `falls`; NaN is never better."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if falls(metric) else value > best + min_delta


def note_best(state: RunState, metrics: Metrics, metric: str | None) -> bool:
    """Note whether an evaluation is the best of a run so far, by `metric` or else its loss or reward."""
    watched = metric or ("eval_loss" if "eval_loss" in metrics else "eval_reward")
    before = None if state.best is None else state.best["value"]
    if watched not in metrics or not is_better(watched, metrics[watched], before):
        return False
    state.best = {"metric": watched, "value": metrics[watched], "step": state.step}
    state.best_steps.append(state.step)
    return True


def restore_best_weights(
    directory: Path, learner: nn.Module, state: RunState, *, world: World = SOLO
) -> None:
    """Load the weights of the best step whose checkpoint is intact into the learner."""
    if not state.best:
        return
    best, problem = state.best, "it is not there"
    for step in reversed(state.best_steps):
        path = checkpoint_path(directory, step)
        if not path.is_dir():  # it could not be saved, or made room for a better one
            continue
        try:
            load_checkpoint(path, learner, world=world)
        except CheckpointError as error:
            problem = error.message
            continue
        if step == best["step"]:
            log.info("the weights are those of step %(step)d, the best by %(metric)s", best)
        else:
            log.warning(
                "the weights of step %d, the best by %s, are lost: those of step %d, the best before "
                "it, are used",
                *(best["step"], best["metric"], step),
            )
        return
    log.warning("the best weights are lost, and the last ones are used: %s", problem)
