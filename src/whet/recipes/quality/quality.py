"""The recipe of the quality-decision task: its rows, metrics, final files and dry run."""

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
from whet.data.sources.source import GivenRows, Source, Spec, open_source
from whet.errors import ConfigError
from whet.hardware import Precision, choose_device
from whet.model_io.fingerprints import weights_digest
from whet.objectives.objective import Objective
from whet.recipes.quality.padic_router import EXPERTS, IN_DIM
from whet.recipes.quality.regression import Regression
from whet.recipes.quality.row_batches import QualityRows, RowPart, RowStream, read_rows, row_batches
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
from whet.run_directory import ARCH_FILE, CONFIG_FILE, FINAL, LOG_FILE, METRICS_FILE, PROVENANCE_FILE
from whet.storage import append_text, new_directory, read_json, write_json, write_text
from whet.training.callbacks import Callback, Injector, Metrics
from whet.training.loss import evaluate_loss
from whet.training.optim.lr_schedules import create_schedule
from whet.training.state import RunResult
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

CHECKPOINT = "checkpoint.tkp1"
_EVALUATED_ROWS = 4096  # at once
DRY = "dry_run"
_DECIMALS = {
    "final_loss": 6,
    "time_elapsed_sec": 3,
    "throughput_steps_per_sec": 2,
    "last_router_entropy": 4,
}


class RowData:
    """The rows that a config's data section names, in the same form as the texts of other runs."""

    def __init__(self, config: RunConfig, given: GivenRows = MappingProxyType({})) -> None:
        self.config = config
        data, run = config.data, config.run
        self.steps = StepSettings(
            run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=True, order=data.order
        )
        self.sources: dict[RowPart, Source] = {
            split: open_source(spec, split=split, form="tabular", on_bad=data.on_bad_record, given=given)
            for split in SPLITS
            if (spec := getattr(data, split)) is not None
        }
        self.rows: dict[RowPart, QualityRows] = {}
        self.examples: dict[str, Any] = {}  # Any: none; an objective on texts has some

    def texts(self) -> Iterator[str]:
        """Return nothing: rows are not texts."""
        return iter(())

    def prepare(self, tokenizer: object = None) -> None:
        """Read every source; one that is named for several splits is divided between them."""
        data = self.config.data
        for split, source in self.sources.items():
            rows = read_rows(source, inputs=IN_DIM, outputs=OUT_DIM)
            sharing = [other for other in SPLITS if getattr(data, other) == getattr(data, split)]
            if len(sharing) > 1:
                rows = rows.only(split, among=sharing)
            self.rows[split] = rows
            log.info("%s: %s: %d rows", split, source.name, len(rows))
            if source.skipped.count:
                log.warning("%s: %s", split, source.skipped.summary())

    def check(self, _: TabularModel) -> None:
        """Widths are checked as rows are read."""

    def digests(self) -> dict[str, str]:
        """A hash of each source's content."""
        return {split: source.digest() for split, source in self.sources.items()}

    def token_digests(self) -> dict[str, str]:
        """Rows are no tokens."""
        return {}

    def describe_steps(self) -> str:
        """How large a step is, for a person."""
        return f"{self.steps.batch_size or self.steps.batch_tokens:,} rows"

    def stream(self) -> RowStream:
        """The training steps."""
        return RowStream(self.rows["train"], self.steps, seed=self.config.run.seed)

    def split(self, name: RowPart, _: TabularModel) -> EvaluationSplit | None:
        """The batches of valid or test."""
        if name not in self.rows:
            return None
        batches: list[Batch] = list(row_batches(self.rows[name], range(len(self.rows[name])), self.steps))
        limit = self.config.eval.batches if name == "valid" else None
        return EvaluationSplit(batches[:limit], [])


class Gluing(Injector):
    """For each pair of experts, how far they disagree on the rows they share; none is shared: not there."""

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Of a training step."""
        glue(metrics)

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Of an evaluation."""
        glue(metrics, prefix="eval_")


def glue(metrics: Metrics, *, prefix: str = "") -> None:
    """Turn sums over all rows into means over the shared ones."""
    apart = metrics.pop(f"{prefix}pair_disagreement", None)
    if apart is not None:
        shares = metrics[f"{prefix}pair_share"]
        metrics[f"{prefix}gluing_residual"] = {
            f"{a}-{b}": total / share
            for (a, b), total, share in zip(PAIRS, apart, shares, strict=True)
            if share
        }


class QualityRow(Injector):
    """Adds to every training row what parsers of this task's metrics expect beside whet's own names."""

    def __init__(self, spec: QualitySpec) -> None:
        self.size = spec.size

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Complete the row."""
        metrics |= known_names(metrics["loss"], metrics["elapsed_s"], self.size)


def known_names(loss: float, elapsed_s: float, size: str) -> Metrics:
    """Return the loss as `final_loss`, the milliseconds since the run began, and the model's size."""
    return {"final_loss": loss, "elapsed_ms": 1000 * elapsed_s, "model_size": size}


class QualitySummary(Injector):
    """What the last line of a run says of it."""

    def __init__(self, spec: QualitySpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory

    def on_train_end(self, result: RunResult) -> None:
        """Add it to the summary."""
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
    """Size, cost and result of a run, and where it is."""
    return {
        "model_size": spec.size,
        "arm": spec.arm,
        "total_params": spec.parameter_count(),
        "final_loss": loss,
        "steps_run": steps,
        "time_elapsed_sec": seconds,
        "throughput_steps_per_sec": steps / seconds if seconds else math.nan,
        "last_router_entropy": entropy,
        "checkpoint": str(directory / FINAL / CHECKPOINT),
        "arch": str(directory / ARCH_FILE),
        "metrics_path": str(directory / METRICS_FILE),
        "arch_path": str(directory / ARCH_FILE),
        "fingerprint": spec.fingerprint(),
    }


def summary_line(fields: Mapping[str, Any]) -> str:  # Any: as above
    """SUMMARY: and what `summary_fields` gives, as key=value."""
    shown = {
        name: f"{value:.{_DECIMALS[name]}f}" if name in _DECIMALS else value for name, value in fields.items()
    }
    return "SUMMARY: " + " ".join(f"{name}={value}" for name, value in shown.items())


def write_final(trainer: Trainer, directory: Path, *, seed: int) -> None:
    """`final/`: the model to use, and the checkpoint that the task's other tools read."""
    model = trainer.model
    assert isinstance(model, TabularModel)
    steps = trainer.total_steps or trainer.state.step
    with new_directory(directory / FINAL) as staging:
        save_quality(model, staging)
        write_tkp1(
            staging / CHECKPOINT,
            step=steps,
            config={"size": model.spec.size, "seed": seed, "steps": steps},
            count=model.spec.tensor_count(),
            records=tkp1_records(model, trainer.optimizer.state.__getitem__, step=trainer.state.step),
        )


def evaluate_quality(path: str | Path, data: Spec) -> Metrics:
    """Return the loss of a finished run's model on every row of a source, and what its router does with them.

    `eval_loss` has the weights of the run's own objective, so it compares with those of the run.
    """
    model = load_quality(path, device=choose_device())
    rows = read_rows(open_source(data, split="test", form="tabular"), inputs=IN_DIM, outputs=OUT_DIM)
    settings = StepSettings(None, _EVALUATED_ROWS, _EVALUATED_ROWS, pack=True, order="sequential")
    dtype = next(model.parameters()).dtype
    metrics = evaluate_loss(
        model,
        Regression(gluing=_gluing_of(Path(path))),
        row_batches(rows, range(len(rows)), settings),
        precision=Precision(dtype, dtype, dtype, "as loaded"),
    )
    glue(metrics, prefix="eval_")
    return metrics


def _gluing_of(path: Path) -> float:
    """Return `objective.gluing` of the run that a model is from; 0 where its config is not there."""
    files = [directory / CONFIG_FILE for directory in (path, path.absolute().parent)]
    file = next((file for file in files if file.is_file()), None)
    objective = None if file is None else load_config(file).objective
    return objective.gluing if isinstance(objective, RegressionObjective) else 0.0


def dry_run(
    config: RunConfig,
    describe_origins: Callable[..., dict[str, Any]],  # as runs describe them; Any: JSON values
) -> dict[str, Any]:  # Any: the fields of the summary line
    """Go through a run with no model: its rows are read and planned, and all its files are written.

    It lands beside the run, in NAME-dry-run, and may replace an earlier dry run.
    """
    assert isinstance(config.model, Quality)
    began = time.perf_counter()
    spec = QualitySpec.from_config(config.model)
    directory = config.directory.with_name(f"{config.run.name}-dry-run")
    earlier = directory.is_dir() and _is_dry(directory)
    if directory.exists() and not earlier:
        raise ConfigError(f"{directory} exists already, and is no dry run", hint="choose another run.name")
    data = RowData(config)
    data.prepare()
    stream = data.stream()
    run, optim = config.run, config.optim
    steps = run.steps or sum(stream.steps_in(epoch) for epoch in range(run.epochs or 0))
    rate = create_schedule(optim, steps)
    rows = [_dry_row(step, rate(step), spec, began=began) for step in range(1, steps + 1)]
    marked = {
        "size": spec.size,
        "seed": run.seed,
        "steps": steps,
        DRY: True,
        "optimizer": optim.name,
        "momentum": optim.momentum,
    }
    fields = summary_fields(
        spec,
        directory,
        loss=1 / steps,
        steps=steps,
        seconds=time.perf_counter() - began,
        entropy=math.nan,
    )
    with new_directory(directory.resolve(), replace=earlier) as staging:
        write_text(staging / CONFIG_FILE, to_yaml(config))
        write_json(staging / ARCH_FILE, architecture(spec))
        device = choose_device(config.run.device)
        origins = describe_origins(
            data.digests(), "none: a dry run", device=device, began=date.today(), tokens={}
        )
        write_json(staging / PROVENANCE_FILE, {DRY: True, **origins})
        summary = {"summary": {DRY: True, **fields, "last_router_entropy": "nan"}}
        append_text(staging / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in [*rows, summary]))
        write_text(staging / LOG_FILE, f"a dry run: {steps} steps, no model\n")
        (staging / FINAL).mkdir()
        write_json(staging / FINAL / ARCH_FILE, architecture(spec))
        write_tkp1(staging / FINAL / CHECKPOINT, step=steps, config=marked, count=0, records=())
    return fields


def _is_dry(directory: Path) -> bool:
    path = directory / PROVENANCE_FILE
    return not any(directory.iterdir()) or (path.is_file() and read_json(path).get(DRY) is True)


def _dry_row(step: int, lr: float, spec: QualitySpec, *, began: float) -> Metrics:
    """Return a row of a run that did not happen: a loss of 1 / step, and rows spread evenly."""
    elapsed_s = time.perf_counter() - began
    routed = {"router_entropy_mean": math.log(EXPERTS), "per_expert_share": [1 / EXPERTS] * EXPERTS}
    row: Metrics = {
        "step": step,
        "loss": 1 / step,
        "grad_norm": 1 / step,
        "lr": lr,
        "elapsed_s": elapsed_s,
        **known_names(1 / step, elapsed_s, spec.size),
        DRY: True,
    }
    return row if spec.arm == "dense" else row | routed


class QualityRecipe(Recipe[RegressionObjective]):
    """The quality-decision models, on rows of numbers."""

    answers_in_text = False
    counts_flops = False

    def open_data(self, *, today: date | None = None) -> RowData:
        """Open the tables."""
        return RowData(self.config, self.given.data)

    def find_tokenizer(self, data: RecipeData, directory: Path) -> None:
        """Return None: rows need no tokenizer."""
        return

    def model(
        self,
        tokenizer: None,
        *,
        device: torch.device,
        precision: Precision,
    ) -> tuple[TabularModel, str]:
        """Return a new model and the digest of its weights."""
        log.info("device: %s; precision %s", device, precision.reason)
        model = new_quality_model(self._spec, seed=self.config.run.seed)
        model.to(device, precision.trained).requires_grad_(True)
        digest = weights_digest(model)
        log.info("parameters: %s", describe_parameters(model))
        return model, digest

    @property
    def _spec(self) -> QualitySpec:
        assert isinstance(self.config.model, Quality)  # a config with this objective has no other
        return QualitySpec.from_config(self.config.model)

    def objective(self, b: Build) -> Objective:
        """Return the objective."""
        return Regression(gluing=self.section.gluing)

    def callbacks(self, b: Build) -> list[Callback]:
        """Return how experts agree, the rows' other names, and the last line."""
        return [Gluing(), QualityRow(self._spec), QualitySummary(self._spec, b.directory)]

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return none: the loss has everything."""
        return []

    def files(self, b: Build) -> dict[str, str]:
        """Return the architecture, as the task's other tools read it."""
        return {ARCH_FILE: json.dumps(architecture(self._spec), indent=2) + "\n"}

    def stage(self, b: Build, staging: Path) -> None:
        """Write nothing more: there is no tokenizer."""

    def save_final(self, b: Build, trainer: Trainer, path: Path) -> None:
        """Write the model, and the checkpoint that the task's other tools read."""
        with b.world.abreast():
            if b.world.is_main:
                write_final(trainer, b.directory, seed=self.config.run.seed)
