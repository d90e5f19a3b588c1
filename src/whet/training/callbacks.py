"""Base classes of callbacks.

Every callback sees metrics and may stop the run, injectors add metrics, and model callbacks use the model.
"""

import abc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from whet.config.run_config import RunConfig
from whet.data.batches import Step
from whet.errors import check_positive
from whet.training.observe.log_window import LogWindow

if TYPE_CHECKING:
    from whet.training.state import RunResult
    from whet.training.trainer import Trainer


# Checkpoints of version 0.1.0 stored callback states under class names.
_STATE_KEY_BY_CLASS = {
    "MetricsLogger": "metrics-logger",
    "EarlyStopping": "early-stopping",
    "LossCurvature": "loss-curvature",
    "RouterMetrics": "router-metrics",
    "SinkCallback": "sink",
}

Metrics = dict[str, Any]  # Any: numbers, lists of numbers, and the strings of a run summary


@dataclass(frozen=True)
class StopRun:
    """A request to stop the run after this step, returned by a callback.

    Args:
        reason: Why the run stops. It is logged and stored in the run summary.
        unfinished: Whether steps remain. If True, a checkpoint is saved and `whet resume` continues from it.
            If False, the run counts as finished.
    """

    reason: str
    unfinished: bool = False


class EvaluationStoppedError(Exception):
    """Raised between the batches of an evaluation to abort it; a resumed run repeats the evaluation."""


class RunView:
    """Read-only view of a run for callbacks: its settings, step and last batches, but not the model."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = weakref.ref(trainer)  # a reference cycle would delay freeing the model
        self.directory: Path | None = trainer.directory
        self.config: RunConfig | None = trainer.config
        self.device = trainer.device
        self.total_steps: int | None = trainer.total_steps
        self.unit = trainer.objective.unit  # unit of throughput, such as tokens
        self.progress = trainer.objective.progress  # metric -> label, shown next to the loss
        self.is_main: bool = trainer.world.is_main  # whether this process is rank 0, which writes files
        self.loss_weight = 0.0  # number of tokens, pairs or texts that the last loss is averaged over
        self.weighted: frozenset[str] = frozenset()  # metrics of the last step averaged the same way

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        trainer = self._trainer()
        return 0 if trainer is None else trainer.state.step

    @property
    def last_step(self) -> Step | None:
        """The last step, with its batches and samples; None before the first."""
        trainer = self._trainer()
        return None if trainer is None else trainer.last_step

    def note_step(self, *, weight: float, weighted: frozenset[str]) -> None:
        """Record the weight that a step's loss is averaged over, and the metrics averaged the same way."""
        self.loss_weight, self.weighted = weight, weighted

    def __getattr__(self, name: str) -> Any:  # Any: never returns
        raise AttributeError(
            f"RunView has no attribute {name!r}. To use the model, inherit from whet.ModelCallback and use "
            "self.trainer."
        )


class Callback:
    """Base class of callbacks. Every hook except `on_train_end` may return a StopRun.

    A callback sees metrics only, so the next step may already be queued on the GPU when a hook runs. Inherit
    from ModelCallback to read or change the model. In a distributed run every rank has its own instances, and
    all ranks stop when one callback asks to stop.
    """

    # Name of the callback's state in checkpoints. Without it the class name is used, and renaming the class
    # loses the state.
    state_key: ClassVar[str | None] = None
    main_only = False  # True: called on rank 0 only, for callbacks that write or print

    def on_train_begin(self, run: RunView) -> StopRun | None:
        """Called once, before the first evaluation."""

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Called after each optimizer step.

        Args:
            step: The number of the step, counted from 1.
            metrics: The metrics of the step. Only an Injector may add to them.
        """

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """Called after each evaluation.

        Args:
            step: The number of optimizer steps so far; 0 for the evaluation before the first step.
            metrics: The metrics of the evaluation. Only an Injector may add to them.
        """

    def on_pause(self) -> StopRun | None:
        """Called between the batches and completions of an evaluation; a StopRun aborts it."""

    def on_save(self, step: int, path: Path) -> StopRun | None:
        """Called after a checkpoint was written.

        Args:
            step: The step of the checkpoint, which may be earlier than the current one.
            path: The directory of the checkpoint.
        """

    def on_train_end(self, result: "RunResult") -> None:
        """Called at the end, when a finished run has its `final/`; an Injector may add to the summary."""

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the JSON-serializable state to store in every checkpoint; empty if there is none."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore what `state` returned, when a run is resumed."""


class Injector(Callback):
    """A callback that adds to the metrics of a step or evaluation; injectors run before other callbacks."""


class ModelCallback(Callback):
    """A callback that uses the model, its gradients or the random state through `self.trainer`."""

    trainer: "Trainer"  # set before on_train_begin

    def touches_model(self, step: int) -> bool:
        """Return whether `on_step_end` uses the model at this step; if not, the next step is prefetched."""
        return True


class RowCallback(Callback, abc.ABC):
    """Base class of callbacks that write metrics rows.

    Training rows are written every `every` steps, at steps with probes and at the last step. Every evaluation
    row is written. A training row aggregates the steps since the previous one, as described at LogWindow.
    """

    main_only = True

    def __init__(self, every: int) -> None:
        check_positive(every=every)
        self.every = every
        self._last_step: int | None = None
        self._unwritten: tuple[int, Metrics] | None = None  # the last step, if its row was not due
        self._window = LogWindow()

    def on_train_begin(self, run: RunView) -> None:
        """Store the run and its last step."""
        self.run = run
        self._last_step = run.total_steps

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Write a training row if one is due."""
        self._window.add(metrics, weight=self.run.loss_weight, weighted=self.run.weighted)
        due = step % self.every == 0 or "probe_s" in metrics or step == self._last_step
        self._unwritten = None if due else (step, metrics)
        if due:
            self._write_window(step, metrics)

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Write an evaluation row."""
        self.write_row(step, metrics)

    def on_train_end(self, result: "RunResult") -> None:
        """Write the row of the last step if the run ended before `total_steps`."""
        if self._unwritten is not None and not result.unfinished:
            self._write_window(*self._unwritten)

    def _write_window(self, step: int, metrics: Metrics) -> None:
        self.write_row(step, self._window.row(metrics))
        self._window = LogWindow()

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the sums over the steps since the last row."""
        return {"window": asdict(self._window)} if self._window.steps else {}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore the sums since the last row, which older checkpoints do not have."""
        self._window = LogWindow(**state.get("window", {}))

    @abc.abstractmethod
    def write_row(self, step: int, metrics: Metrics) -> None:
        """Write one metrics row."""


def to_python(value: Any) -> Any:  # Any: a metric; JSON values
    """Convert NumPy and torch values, also nested ones, to Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: to_python(item) for key, item in value.items()}
    return [to_python(item) for item in value] if isinstance(value, list | tuple) else value


def with_state_names(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yield callbacks with the names of their states in checkpoints, such as `sink-0`."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        key = callback.state_key or type(callback).__name__
        yield f"{key}-{seen[key]}", callback
        seen[key] += 1


def upgrade_state_names(states: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return the callback states of a checkpoint under the names that this version uses."""
    upgraded = {}
    for name, state in states.items():
        key, _, number = name.rpartition("-")
        upgraded[f"{_STATE_KEY_BY_CLASS.get(key, key)}-{number}"] = state
    return upgraded
