"""The recipe of the quality-decision task: its data, metrics, final files and dry run."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from whet.config.load_config import load_config, to_yaml
from whet.config.quality import Quality, RegressionObjective
from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.data.packing import StepSettings
from whet.data.run_data import SPLITS, EvaluationSplit
from whet.data.sources.source import GivenRows, Source, SourceSpec, open_source
from whet.errors import ConfigError
from whet.hardware import Precision, choose_device
from whet.model_io.fingerprints import weights_digest
from whet.objectives.objective import Objective
from whet.recipes.quality.padic_router import EXPERTS, IN_DIM
from whet.recipes.quality.regression import Regression
from whet.recipes.quality.row_batches import QualityRows, RowSplit, RowStream, read_rows, row_batches
from whet.recipes.quality.tabular_model import (
    OUT_DIM,
    PAIRS,
    QualitySpec,
    TabularModel,
    architecture,
    load_quality,
    new_quality_model,
    save_quality,
)
from whet.recipes.quality.tkp1 import tkp1_records, write_tkp1
from whet.recipes.recipe import Build, Evaluators, Recipe, RecipeData, describe_parameters
from whet.run_directory import (
    ARCH_FILE,
    CONFIG_FILE,
    FINAL_DIRECTORY,
    LOG_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
)
from whet.storage import append_text, create_directory_atomically, read_json, write_json, write_text
from whet.training.callbacks import Callback, Injector, Metrics
from whet.training.loss import evaluate_loss
from whet.training.optim.lr_schedules import create_schedule
from whet.training.state import RunResult
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

CHECKPOINT = "checkpoint.tkp1"
_EVALUATION_BATCH_ROWS = 4096
DRY_RUN_KEY = "dry_run"
_DECIMALS = {
    "final_loss": 6,
    "time_elapsed_sec": 3,
    "throughput_steps_per_sec": 2,
    "last_router_entropy": 4,
}


class RowData:
    """The tabular rows of a config's data section, with the interface of RunData."""

    def __init__(self, config: RunConfig, given: GivenRows = MappingProxyType({})) -> None:
        self.config = config
        data, run = config.data, config.run
        self.steps = StepSettings(
            run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=True, order=data.order
        )
        self.sources: dict[RowSplit, Source] = {
            split: open_source(spec, split=split, form="tabular", on_bad=data.on_bad_record, given=given)
            for split in SPLITS
            if (spec := getattr(data, split)) is not None
        }
        self.rows: dict[RowSplit, QualityRows] = {}
        self.examples: dict[str, Any] = {}  # Any: always empty; other objectives have tokenized examples here

    def training_texts(self) -> Iterator[str]:
        """Return an empty iterator, because rows are not text."""
        return iter(())

    def prepare(self, tokenizer: object = None) -> None:
        """Read every source, and divide a source that is used for several splits between them."""
        data = self.config.data
        for split, source in self.sources.items():
            rows = read_rows(source, inputs=IN_DIM, outputs=OUT_DIM)
            same_source = [name for name in SPLITS if getattr(data, name) == getattr(data, split)]
            if len(same_source) > 1:
                rows = rows.select_split(split, splits=same_source)
            self.rows[split] = rows
            log.info("%s: %s: %d rows", split, source.name, len(rows))
            if source.skipped.count:
                log.warning("%s: %s", split, source.skipped.summary())

    def check_model_limits(self, _: TabularModel) -> None:
        """Do nothing, because `prepare` checks the number of features and targets."""

    def digests(self) -> dict[str, str]:
        """Return a hash of each source's records."""
        return {split: source.digest() for split, source in self.sources.items()}

    def token_digests(self) -> dict[str, str]:
        """Return an empty mapping, because rows have no tokens."""
        return {}

    def describe_steps(self) -> str:
        """Return the size of a step in words."""
        return f"{self.steps.batch_size or self.steps.batch_tokens:,} rows"

    def stream(self) -> RowStream:
        """Return the training steps."""
        return RowStream(self.rows["train"], self.steps, seed=self.config.run.seed)

    def evaluation_split(self, name: RowSplit, _: TabularModel) -> EvaluationSplit | None:
        """Return the batches of the split "valid" or "test", or None if the run does not have it."""
        if name not in self.rows:
            return None
        batches: list[Batch] = list(row_batches(self.rows[name], range(len(self.rows[name])), self.steps))
        limit = self.config.eval.batches if name == "valid" else None
        return EvaluationSplit(batches[:limit], [])


class GluingResidual(Injector):
    """Adds the metric gluing_residual: the disagreement of each pair of experts on the rows they share."""

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Add gluing_residual to the metrics of a training step."""
        add_gluing_residual(metrics)

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Add eval_gluing_residual to the metrics of an evaluation."""
        add_gluing_residual(metrics, prefix="eval_")


def add_gluing_residual(metrics: Metrics, *, prefix: str = "") -> None:
    """Replace pair_disagreement, a mean over all rows, by the mean over each pair's shared rows.

    Pairs of experts without shared rows are left out.
    """
    disagreements = metrics.pop(f"{prefix}pair_disagreement", None)
    if disagreements is not None:
        shares = metrics[f"{prefix}pair_share"]
        metrics[f"{prefix}gluing_residual"] = {
            f"{a}-{b}": disagreement / share
            for (a, b), disagreement, share in zip(PAIRS, disagreements, shares, strict=True)
            if share
        }


class QualityMetricNames(Injector):
    """Adds the metric names that other tools for this task expect to every training row."""

    def __init__(self, spec: QualitySpec) -> None:
        self.size = spec.size

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Add the metrics to the row."""
        metrics |= quality_metrics(metrics["loss"], metrics["elapsed_s"], self.size)


def quality_metrics(loss: float, elapsed_s: float, size: str) -> Metrics:
    """Return the loss as `final_loss`, the milliseconds since the start of the run, and the model's size."""
    return {"final_loss": loss, "elapsed_ms": 1000 * elapsed_s, "model_size": size}


class QualitySummary(Injector):
    """Adds the fields of the SUMMARY line to the summary of a run."""

    def __init__(self, spec: QualitySpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory

    def on_train_end(self, result: RunResult) -> None:
        """Add the fields to the summary of a finished run."""
        if not result.unfinished:
            entropy = result.metrics.get("router_entropy_mean", math.nan)
            result.summary["quality"] = summary_fields(
                self.spec,
                self.directory,
                loss=result.metrics["loss"],
                steps=result.steps,
                seconds=result.summary["seconds"],
                entropy=entropy,
            )


def summary_fields(
    spec: QualitySpec, directory: Path, *, loss: float, steps: int, seconds: float, entropy: float
) -> dict[str, Any]:  # Any: numbers and texts
    """Return the fields of the SUMMARY line: model, loss, throughput, and the paths of its files."""
    return {
        "model_size": spec.size,
        "arm": spec.arm,
        "total_params": spec.parameter_count(),
        "final_loss": loss,
        "steps_run": steps,
        "time_elapsed_sec": seconds,
        "throughput_steps_per_sec": steps / seconds if seconds else math.nan,
        "last_router_entropy": entropy,
        "checkpoint": str(directory / FINAL_DIRECTORY / CHECKPOINT),
        "arch": str(directory / ARCH_FILE),
        "metrics_path": str(directory / METRICS_FILE),
        "arch_path": str(directory / ARCH_FILE),
        "fingerprint": spec.fingerprint(),
    }


def summary_line(fields: Mapping[str, Any]) -> str:  # Any: as above
    """Return the SUMMARY line: the values of `summary_fields` as key=value."""
    formatted = {
        name: f"{value:.{_DECIMALS[name]}f}" if name in _DECIMALS else value for name, value in fields.items()
    }
    return "SUMMARY: " + " ".join(f"{name}={value}" for name, value in formatted.items())


def write_final(trainer: Trainer, directory: Path, *, seed: int) -> None:
    """Write `final/`: the model, and a TKP1 checkpoint for other tools."""
    model = trainer.model
    assert isinstance(model, TabularModel)
    steps = trainer.total_steps or trainer.state.step
    with create_directory_atomically(directory / FINAL_DIRECTORY) as staging:
        save_quality(model, staging)
        write_tkp1(
            staging / CHECKPOINT,
            step=steps,
            config={"size": model.spec.size, "seed": seed, "steps": steps},
            count=model.spec.tensor_count(),
            records=tkp1_records(model, trainer.optimizer.state.__getitem__, step=trainer.state.step),
        )


def evaluate_quality(path: str | Path, data: SourceSpec) -> Metrics:
    """Evaluate the model of a finished run on every row of a source.

    Args:
        path: The run directory or its `final/`.
        data: The source of the rows.

    Returns:
        The loss and the router's metrics. `eval_loss` uses the run's weight of the gluing term, so it is
        comparable with the evaluations of the run.
    """
    model = load_quality(path, device=choose_device())
    rows = read_rows(open_source(data, split="test", form="tabular"), inputs=IN_DIM, outputs=OUT_DIM)
    settings = StepSettings(
        None, _EVALUATION_BATCH_ROWS, _EVALUATION_BATCH_ROWS, pack=True, order="sequential"
    )
    dtype = next(model.parameters()).dtype
    metrics = evaluate_loss(
        model,
        Regression(gluing=_gluing_weight(Path(path))),
        row_batches(rows, range(len(rows)), settings),
        precision=Precision(dtype, dtype, dtype, "as loaded"),
    )
    add_gluing_residual(metrics, prefix="eval_")
    return metrics


def _gluing_weight(path: Path) -> float:
    """Return `objective.gluing` of the run that a model belongs to, or 0 if it has no config."""
    files = [directory / CONFIG_FILE for directory in (path, path.absolute().parent)]
    file = next((file for file in files if file.is_file()), None)
    objective = None if file is None else load_config(file).objective
    return objective.gluing if isinstance(objective, RegressionObjective) else 0.0


def write_dry_run(
    config: RunConfig,
    collect_provenance: Callable[..., dict[str, Any]],  # Any: JSON values
) -> dict[str, Any]:  # Any: the fields of the summary line
    """Write all files of a run without building a model, with its real data and step count.

    The files go to NAME-dry-run, next to the run, and replace an earlier dry run.

    Args:
        config: The run's config.
        collect_provenance: `whet.runs.provenance.provenance`, which this package must not import.

    Returns:
        The fields of the SUMMARY line.
    """
    assert isinstance(config.model, Quality)
    started = time.perf_counter()
    spec = QualitySpec.from_config(config.model)
    directory = config.directory.with_name(f"{config.run.name}-dry-run")
    replaces_dry_run = directory.is_dir() and _is_dry_run(directory)
    if directory.exists() and not replaces_dry_run:
        raise ConfigError(f"{directory} already exists, and is not a dry run", hint="choose another run.name")
    data = RowData(config)
    data.prepare()
    stream = data.stream()
    run, optim = config.run, config.optim
    steps = run.steps or sum(stream.steps_in(epoch) for epoch in range(run.epochs or 0))
    lr_at = create_schedule(optim, steps)
    rows = [_dry_run_row(step, lr_at(step), spec, started=started) for step in range(1, steps + 1)]
    checkpoint_config = {
        "size": spec.size,
        "seed": run.seed,
        "steps": steps,
        DRY_RUN_KEY: True,
        "optimizer": optim.name,
        "momentum": optim.momentum,
    }
    fields = summary_fields(
        spec,
        directory,
        loss=1 / steps,
        steps=steps,
        seconds=time.perf_counter() - started,
        entropy=math.nan,
    )
    with create_directory_atomically(directory.resolve(), replace=replaces_dry_run) as staging:
        write_text(staging / CONFIG_FILE, to_yaml(config))
        write_json(staging / ARCH_FILE, architecture(spec))
        device = choose_device(config.run.device)
        provenance = collect_provenance(
            data.digests(), "none: a dry run", device=device, start_date=date.today(), token_digests={}
        )
        write_json(staging / PROVENANCE_FILE, {DRY_RUN_KEY: True, **provenance})
        summary = {"summary": {DRY_RUN_KEY: True, **fields, "last_router_entropy": "nan"}}
        append_text(staging / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in [*rows, summary]))
        write_text(staging / LOG_FILE, f"a dry run: {steps} steps, no model\n")
        (staging / FINAL_DIRECTORY).mkdir()
        write_json(staging / FINAL_DIRECTORY / ARCH_FILE, architecture(spec))
        write_tkp1(
            staging / FINAL_DIRECTORY / CHECKPOINT, step=steps, config=checkpoint_config, count=0, records=()
        )
    return fields


def _is_dry_run(directory: Path) -> bool:
    path = directory / PROVENANCE_FILE
    return not any(directory.iterdir()) or (path.is_file() and read_json(path).get(DRY_RUN_KEY) is True)


def _dry_run_row(step: int, lr: float, spec: QualitySpec, *, started: float) -> Metrics:
    """Return the metrics row of a step that was not computed: a loss of 1 / step, and uniform routing."""
    elapsed_s = time.perf_counter() - started
    router_metrics = {"router_entropy_mean": math.log(EXPERTS), "per_expert_share": [1 / EXPERTS] * EXPERTS}
    row: Metrics = {
        "step": step,
        "loss": 1 / step,
        "grad_norm": 1 / step,
        "lr": lr,
        "elapsed_s": elapsed_s,
        **quality_metrics(1 / step, elapsed_s, spec.size),
        DRY_RUN_KEY: True,
    }
    return row if spec.arm == "dense" else row | router_metrics


class QualityRecipe(Recipe[RegressionObjective]):
    """Trains the quality-decision models on tabular rows."""

    generates_text = False
    counts_flops = False

    def open_data(self, *, today: date | None = None) -> RowData:
        """Open the sources of tabular rows without reading them."""
        return RowData(self.config, self.given.data)

    def find_tokenizer(self, data: RecipeData, directory: Path) -> None:
        """Return None, because rows do not need a tokenizer."""
        return

    def model(
        self,
        tokenizer: None,
        *,
        device: torch.device,
        precision: Precision,
    ) -> tuple[TabularModel, str]:
        """Return a new model and the hash of its weights."""
        log.info("device: %s; precision %s", device, precision.reason)
        model = new_quality_model(self._spec, seed=self.config.run.seed)
        model.to(device, precision.trained).requires_grad_(True)
        digest = weights_digest(model)
        log.info("parameters: %s", describe_parameters(model))
        return model, digest

    @property
    def _spec(self) -> QualitySpec:
        assert isinstance(self.config.model, Quality)  # the config allows no other model with this objective
        return QualitySpec.from_config(self.config.model)

    def objective(self, b: Build) -> Objective:
        """Return the regression objective."""
        return Regression(gluing=self.section.gluing)

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the callbacks that add this task's metrics and summary."""
        return [
            GluingResidual(),
            QualityMetricNames(self._spec),
            QualitySummary(self._spec, b.directory),
        ]

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return no evaluators, because the objective computes all metrics."""
        return []

    def files(self, b: Build) -> dict[str, str]:
        """Return arch.json in the format that other tools for this task read."""
        return {ARCH_FILE: json.dumps(architecture(self._spec), indent=2) + "\n"}

    def stage(self, b: Build, staging: Path) -> None:
        """Write nothing, because there is no tokenizer."""

    def save_final(self, b: Build, trainer: Trainer, path: Path) -> None:
        """Write the model, and a TKP1 checkpoint for other tools."""
        with b.world.sync_errors():
            if b.world.is_main:
                write_final(trainer, b.directory, seed=self.config.run.seed)
