"""Sinks for TensorBoard, Weights & Biases, MLflow and trackio."""

import importlib.util
import math
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any  # objects of these libraries, everywhere below

from whet.config.log import SinkName
from whet.errors import ConfigError
from whet.training.observe.metric_sinks import RunInfo, Sink

_PARAMS_PER_CALL = 100  # limit of MLflow


class TensorBoardSink:
    """Writes TensorBoard event files to the run directory; view them with `tensorboard --logdir runs`."""

    def start(self, run: RunInfo) -> None:
        """Open an event file; events after the checkpoint that a run resumes from are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


class WandbSink:
    """Logs to Weights & Biases, configured by its environment variables (WANDB_MODE, WANDB_API_KEY, ...)."""

    def start(self, run: RunInfo) -> str:
        """Create a run, or reopen the one that is resumed."""
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
        # a resumed run repeats rows after its checkpoint, and wandb rejects decreasing steps
        self.run.define_metric("*", step_metric="step")
        return identity

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one row."""
        self.run.log({"step": step, **values})

    def finish(self) -> None:
        """Upload the remaining data."""
        self.run.finish()


class MlflowSink:
    """Logs to the MLflow store that MLFLOW_TRACKING_URI names."""

    def start(self, run: RunInfo) -> str:
        """Create a run, or reopen the one that is resumed."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        if run.identity is not None:
            self.identity = run.identity
            self.client.update_run(self.identity, status="RUNNING")
            return self.identity
        experiment = self.client.get_experiment_by_name(run.project)
        experiment_id = (
            self.client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        self.identity = str(self.client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [Param(name, value) for name, value in _flatten_config(run.config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self.client.log_batch(self.identity, params=params[start : start + _PARAMS_PER_CALL])
        return self.identity

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one row without its non-finite values, which MLflow does not accept."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.client.log_batch(
            self.identity, metrics=[Metric(name, value, now, step) for name, value in finite.items()]
        )

    def finish(self) -> None:
        """Mark the run as terminated."""
        self.client.set_terminated(self.identity)


class TrackioSink:
    """Logs to trackio, on this machine."""

    def start(self, run: RunInfo) -> str:
        """Create a run, or reopen the one that is resumed."""
        import trackio

        identity = run.identity or f"{run.name}-{uuid.uuid4().hex[:6]}"
        self.run: Any = trackio.init(project=run.project, name=identity, config=run.config, resume="allow")
        return identity

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one row."""
        self.run.log(values, step=step)

    def finish(self) -> None:
        """Store the remaining data."""
        self.run.finish()


SINKS: dict[SinkName, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Iterable[SinkName]) -> None:
    """Raise an error for sinks whose package is not installed, before the run starts."""
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.sinks: {name} is not installed",
                hint=f'pip install "whet[{name}]", or remove it from log.sinks',
            )


def _flatten_config(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flatten_config(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)[:500]  # length limit of MLflow stores
