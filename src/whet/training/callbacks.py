"""Callbacks: all see metrics and may stop the run; injectors write metrics, model callbacks use the model."""

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


# checkpoints of 0.1.0 stored states under the names of the classes
_CLASS_NAMES = {
    "MetricsLogger": "metrics-logger",
    "EarlyStopping": "early-stopping",
    "LossCurvature": "loss-curvature",
    "RouterMetrics": "router-metrics",
    "SinkCallback": "sink",
}

Metrics = dict[str, Any]  # Any: numbers, lists of numbers, and the summary's texts


@dataclass(frozen=True)
class StopRun:
    """Returned by a callback to stop the run after this step.

    `unfinished` says that there was more to do: a checkpoint is saved and `whet resume` goes on from it.
    """

    reason: str
    unfinished: bool = False


class EvaluationStoppedError(Exception):
    """Raised between the batches of an evaluation that must not go on: it is done again on resume."""


class RunView:
    """What every callback may know of a run: where it is and what it has counted, but not the model."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = weakref.ref(trainer)  # a cycle would keep the model until garbage is collected
        self.directory: Path | None = trainer.directory
        self.config: RunConfig | None = trainer.config
        self.device = trainer.device
        self.total_steps: int | None = trainer.total_steps
        self.unit = trainer.objective.unit  # what throughput is counted in
        self.progress = trainer.objective.progress  # metric -> label: what to show beside the loss
        self.is_main: bool = trainer.world.is_main  # of several processes, the one that writes
        self.loss_weight = 0.0  # what the loss of the last step is a mean over: tokens, pairs or texts
        self.weighted: frozenset[str] = frozenset()  # the metrics of the last step that are such means, too

    @property
    def step(self) -> int:
        """Updates made so far."""
        trainer = self._trainer()
        return 0 if trainer is None else trainer.state.step

    @property
    def last_step(self) -> Step | None:
        """The batches and samples of the last step."""
        trainer = self._trainer()
        return None if trainer is None else trainer.last_step

    def note_step(self, *, weight: float, weighted: frozenset[str]) -> None:
        """Take note of what a step's loss and metrics are means over."""
        self.loss_weight, self.weighted = weight, weighted

    def __getattr__(self, name: str) -> Any:  # Any: never returns
        raise AttributeError(
            f"a callback sees no {name} here: inherit from whet.ModelCallback, use self.trainer"
        )


class Callback:
    """Hooks of a run; each but `on_train_end` may return a StopRun.

    A callback sees metrics only, so a GPU is given the next step before they are known. What reads or changes
    the model is a ModelCallback. On several processes each has its own, and all stop where one wants to.
    """

    # the name its state has in checkpoints; the class's name where none is given, so that a renamed class
    # does not find the state it had
    state_key: ClassVar[str | None] = None
    main_only = False  # called on rank 0 alone: because it writes, or shows, what all have in common

    def on_train_begin(self, run: RunView) -> StopRun | None:
        """Before the first evaluation."""

    def on_step_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """After update `step`, counted from 1."""

    def on_eval_end(self, step: int, metrics: Metrics) -> StopRun | None:
        """After an evaluation; step 0 is the one before the first update."""

    def on_pause(self) -> StopRun | None:
        """Between the batches and answers of an evaluation: a StopRun breaks it off."""

    def on_save(self, step: int, path: Path) -> StopRun | None:
        """After a checkpoint was written."""

    def on_train_end(self, result: "RunResult") -> None:
        """At the end: a finished run has its `final/` by then; an injector may add to the summary."""

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """What a resumed run must know of this callback; stored in every checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Go on from what `state` returned."""


class Injector(Callback):
    """A callback that writes into the step's metrics; injectors run before all others."""


class ModelCallback(Callback):
    """A callback that uses the model, its gradients or the random state, through `self.trainer`."""

    trainer: "Trainer"  # there from on_train_begin on

    def touches_model(self, step: int) -> bool:
        """Return whether `on_step_end` of this step uses it: where not, the next step may be prefetched."""
        return True


class RowCallback(Callback, abc.ABC):
    """Takes training rows every `every` steps, with every probe and of the last step, all evaluation rows.

    A training row is about all steps since the one before it: see LogWindow.
    """

    main_only = True

    def __init__(self, every: int) -> None:
        check_positive(every=every)
        self.every = every
        self._last_step: int | None = None
        self._left: tuple[int, Metrics] | None = None  # the newest training row, where it was not due
        self._window = LogWindow()

    def on_train_begin(self, run: RunView) -> None:
        """Know which step is the last."""
        self.run = run
        self._last_step = run.total_steps

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Take a training row that is due."""
        self._window.add(metrics, weight=self.run.loss_weight, weighted=self.run.weighted)
        due = step % self.every == 0 or "probe_s" in metrics or step == self._last_step
        self._left = None if due else (step, metrics)
        if due:
            self._take_window(step, metrics)

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Take an evaluation row."""
        self.take(step, metrics)

    def on_train_end(self, result: "RunResult") -> None:
        """Take the row of the last step, where a run ends before its time."""
        if self._left is not None and not result.unfinished:
            self._take_window(*self._left)

    def _take_window(self, step: int, metrics: Metrics) -> None:
        self.take(step, self._window.row(metrics))
        self._window = LogWindow()

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """The steps since the last row."""
        return {"window": asdict(self._window)} if self._window.steps else {}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Continue with the steps since the last row; older checkpoints do not have them."""
        self._window = LogWindow(**state.get("window", {}))

    @abc.abstractmethod
    def take(self, step: int, metrics: Metrics) -> None:
        """What becomes of a row."""


def plain(value: Any) -> Any:  # Any: a metric; JSON values
    """Numbers and arrays of numpy and torch as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def named(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yield callbacks under the names their state has in checkpoints: their state_key, numbered."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        key = callback.state_key or type(callback).__name__
        yield f"{key}-{seen[key]}", callback
        seen[key] += 1


def stored_states(states: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return the callbacks' states of a checkpoint under today's names."""
    found = {}
    for name, state in states.items():
        key, _, number = name.rpartition("-")
        found[f"{_CLASS_NAMES.get(key, key)}-{number}"] = state
    return found
