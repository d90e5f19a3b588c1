"""TensorBoard, Weights & Biases, MLflow and trackio as sinks: each a few calls of its library."""

import importlib.util
import math
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any  # everywhere below: what these libraries hand out

from whet.config.log import SinkName
from whet.errors import ConfigError
from whet.training.observe.metric_sinks import RunFacts, Sink

_PARAMS = 100  # the most that MLflow takes at once


class TensorBoardSink:
    """Event files in the run's own directory: tensorboard --logdir runs."""

    def start(self, run: RunFacts) -> None:
        """Open a file of events; what an earlier part wrote after its checkpoint is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Each number as a scalar."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close."""
        self.writer.close()


class WandbSink:
    """A run of Weights & Biases, where its own settings (WANDB_MODE, WANDB_API_KEY, ...) put it."""

    def start(self, run: RunFacts) -> str:
        """Open a run, or the one that an earlier part opened."""
        import wandb

        identity = run.identity or uuid.uuid4().hex[:12]
        self.run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
        )
        # rows after a checkpoint come again when a run is resumed, and wandb refuses steps that go back
        self.run.define_metric("*", step_metric="step")
        return identity

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One row."""
        self.run.log({"step": step, **numbers})

    def finish(self) -> None:
        """Upload what is left."""
        self.run.finish()


class MlflowSink:
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names."""

    def start(self, run: RunFacts) -> str:
        """Open a run, or the one that an earlier part opened."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        if run.identity is not None:
            self.identity = run.identity
            self.client.update_run(self.identity, status="RUNNING")
            return self.identity
        experiment = self.client.get_experiment_by_name(run.project)
        number = (
            self.client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        self.identity = str(self.client.create_run(number, run_name=run.name).info.run_id)
        params = [Param(name, value) for name, value in _settings(run.config)]
        for start in range(0, len(params), _PARAMS):
            self.client.log_batch(self.identity, params=params[start : start + _PARAMS])
        return self.identity

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One row; MLflow's stores do not take what is not finite."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self.client.log_batch(
            self.identity, metrics=[Metric(name, value, now, step) for name, value in finite.items()]
        )

    def finish(self) -> None:
        """Mark it as over."""
        self.client.set_terminated(self.identity)


class TrackioSink:
    """A run of trackio, kept on this machine."""

    def start(self, run: RunFacts) -> str:
        """Open a run, or the one that an earlier part opened."""
        import trackio

        identity = run.identity or f"{run.name}-{uuid.uuid4().hex[:6]}"
        self.run: Any = trackio.init(project=run.project, name=identity, config=run.config, resume="allow")
        return identity

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One row."""
        self.run.log(numbers, step=step)

    def finish(self) -> None:
        """Store what is left."""
        self.run.finish()


SINKS: dict[SinkName, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Iterable[SinkName]) -> None:
    """Refuse sinks whose package is not installed: better now than a run that is nowhere to be seen."""
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.sinks: {name} is not installed",
                hint=f'pip install "whet[{name}]", or take it out of log.sinks',
            )


def _settings(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)[:500]  # the most that its stores take
