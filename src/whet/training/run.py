"""A run, assembled from its config: `whet.train` and `whet.resume`."""

import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.adapters.files import save_adapter
from whet.adapters.load import BASE, load_base, load_quantised, save, save_base, tokenizer_of
from whet.adapters.lora import attach_configured
from whet.adapters.qlora import quantised_weights
from whet.config.load import load_config, make_config, to_yaml
from whet.config.preset import Preset
from whet.config.quality import Quality
from whet.config.sections import RunConfig
from whet.data.batches import Batch, BatchStream
from whet.data.encode import Question
from whet.errors import CheckpointError, ConfigError, ModelError, StorageError
from whet.generation.exact_match import exact_match
from whet.hardware import choose_device, choose_precision
from whet.models.language_model import LanguageModel
from whet.models.scratch import new_model, new_tokenizer
from whet.models.tabular import QualitySpec, TabularModel, architecture, new_quality_model
from whet.objectives.base import Objective
from whet.ops.attention import describe_backend
from whet.storage import clear_leftovers, locked, new_directory, replace_text, write_text
from whet.training.callbacks import (
    Callback,
    EarlyStopping,
    EvaluationStoppedError,
    Injector,
    MemoryLimit,
    Metrics,
    MetricsLogger,
    TimeLimit,
)
from whet.training.checkpoint import newest_valid, read_state
from whet.training.compiling import compile_blocks
from whet.training.provenance import provenance, weights_digest
from whet.training.quality_run import Gluing, QualitySummary, RowData, write_final
from whet.training.resuming import (
    is_finished,
    refuse_changes,
    refuse_other_origins,
    refuse_taken_name,
    set_aside_later_rows,
)
from whet.training.run_data import EvaluationSplit, RunData, Stream
from whet.training.run_log import RunLog
from whet.training.signals import StopOnSignal
from whet.training.state import RunResult
from whet.training.tasks import ObjectiveBuilder
from whet.training.trainer import Trainer

log = logging.getLogger("whet")


def train(
    config: RunConfig | Mapping[str, Any] | str | Path, callbacks: Iterable[Callback] = ()
) -> RunResult:
    """Run a config from its first step to `final/`."""
    # Any: checked by make_config
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, RunConfig):
        config = make_config(config)
    directory = Path(config.run.dir) / config.run.name
    refuse_taken_name(directory)
    clear_leftovers(directory.parent, of=directory.name)
    with StopOnSignal() as signals, RunLog(log) as run_log:
        return _Assembly(config, directory, run_log).go([signals, *callbacks])


def resume(directory: str | Path, callbacks: Iterable[Callback] = ()) -> RunResult:
    """Go on with a run from its newest whole checkpoint."""
    directory = Path(directory)
    if not (directory / "config.yaml").is_file():
        raise CheckpointError(f"{directory} is not a run: it has no config.yaml")
    config = load_config(directory / "config.yaml")
    with StopOnSignal() as signals, RunLog(log) as run_log, locked(directory):
        clear_leftovers(directory)
        clear_leftovers(directory / "checkpoints")
        checkpoint = None if is_finished(directory) else newest_valid(directory)
        if checkpoint is None and (directory / "final").is_dir():
            raise CheckpointError(f"{directory} has finished: its result is in {directory / 'final'}")
        if checkpoint is None:
            log.info("%s was stopped before its first checkpoint: starting over", directory)
        else:
            refuse_changes(read_state(checkpoint).get("config", {}), config, directory)
        assembly = _Assembly(config, directory, run_log)
        return assembly.go([signals, *callbacks], checkpoint=checkpoint, again=True)


def assemble(config: RunConfig) -> tuple[Any, Objective, Stream]:
    """The model, the objective and the steps of a run, for those who want to look at them.

    Any: the kind of model that the objective is for.
    """
    assembly = _Assembly(config, Path(config.run.dir) / config.run.name, RunLog(log))
    stream, objective = assembly.parts()
    return assembly.model, objective, stream


class _Assembly:
    """The parts of a run, built in the order in which mistakes are cheapest to find."""

    def __init__(self, config: RunConfig, directory: Path, run_log: RunLog) -> None:
        self.config = config
        self.directory = directory
        self.run_log = run_log
        self.device = choose_device(config.run.device)
        self.precision = choose_precision(config.run.precision, self.device)
        self.quality = isinstance(config.model, Quality)
        self.data: Any = RowData(config) if self.quality else RunData(config)  # Any: one form, two kinds

    def go(
        self, callbacks: Iterable[Callback], *, checkpoint: Path | None = None, again: bool = False
    ) -> RunResult:
        """Build, train (`again`: a run that was begun before), and leave something people can use."""
        with contextlib.ExitStack() as held:
            stream, objective = self.parts()
            valid, test = self.data.split("valid", self.model), self.data.split("test", self.model)
            self.description = self._describe()
            if again:
                found = self.origins | {"fingerprint": self.model.fingerprint}
                refuse_other_origins(self.directory, found, str(self.model.name))
            else:
                self._write_description()
                held.enter_context(locked(self.directory))
            self.run_log.keep_in(self.directory / "log.txt")
            self.trainer = trainer = Trainer(
                self.model,
                objective,
                stream,
                self.config,
                [*self._own_callbacks(test), *callbacks],
                total_steps=self._count_steps(stream),
                eval_batches=valid.batches if valid else (),
                evaluators=[self._exact_match_on(valid.questions)] if valid and valid.questions else (),
                directory=self.directory,
                precision=self.precision,
            )
            if checkpoint is not None:
                trainer.restore(checkpoint)
                log.info("resuming after step %d, from %s", trainer.state.step, checkpoint)
            if again:
                set_aside_later_rows(
                    self.directory / "metrics.jsonl",
                    step=trainer.state.step if checkpoint is not None else -1,
                    evaluated_step=trainer.state.evaluated_step,
                )
            return trainer.fit()

    def parts(self) -> tuple[Stream, Objective]:
        """The steps and what is optimised in them; the model is `model`."""
        _seed(self.config.run.seed)
        self.tokenizer = self._find_tokenizer()
        self.data.prepare(self.tokenizer)
        stream: Stream = self.data.stream()
        self.model = self._build_model()
        self.data.check(self.model)
        return stream, self._build_objective()

    def _count_steps(self, stream: Stream) -> int:
        run = self.config.run
        steps = run.steps or 0
        if isinstance(stream, BatchStream) and run.epochs:
            steps = sum(stream.steps_in(epoch) for epoch in range(run.epochs))
        size = f"{run.batch_tokens} tokens" if run.batch_tokens else f"{run.batch_size} examples"
        log.info(
            "steps: %d of %s, micro-batches of at most %d tokens", steps, size, self.data.steps.micro_tokens
        )
        return steps

    def _find_tokenizer(self) -> Any:  # Any: a transformers tokenizer
        model = self.config.model
        if isinstance(model, Quality):
            return None
        if isinstance(model, Preset):
            return new_tokenizer(model, self.data.texts(), kept_in=self.directory / "tokenizer")
        if (found := tokenizer_of(model)) is None:
            raise ModelError(f"{model} has no tokenizer, so it cannot read records")
        return found

    def _build_model(self) -> Any:  # Any: the kind of model that the objective is for
        config, method = self.config, self.config.method
        full = method.kind == "full"
        dtype = self.precision.trained if full else self.precision.frozen
        log.info(
            "device: %s; precision %s; attention: %s",
            self.device,
            self.precision.reason,
            describe_backend(self.device),
        )
        model: LanguageModel | TabularModel
        if isinstance(config.model, Quality):
            model = new_quality_model(QualitySpec.from_config(config.model), seed=config.run.seed)
            model.to(self.device, dtype)
        elif isinstance(config.model, Preset):
            model = new_model(config.model, self.tokenizer, seed=config.run.seed)
            model.to(self.device, dtype)
        elif method.kind == "qlora":
            model = load_quantised(config.model, dtype=dtype, device=self.device)
        else:
            model, _ = load_base(config.model, dtype=dtype, device=self.device)
        self.base_digest = weights_digest(model)
        if isinstance(model, TabularModel) or full:
            model.requires_grad_(True)
        else:
            attach_configured(model, method)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.precision.trained)
        if isinstance(model, LanguageModel):
            model.grad_checkpoint = config.run.grad_checkpoint
            if config.run.compile:
                log.info("compile: %s", compile_blocks(model))
        total = sum(p.numel() for p in model.parameters()) + quantised_weights(model)[0]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        log.info(
            "parameters: %s, of which %s train (%.2f%%)", f"{total:,}", f"{trained:,}", 100 * trained / total
        )
        return model

    def _build_objective(self) -> Objective:
        builder = ObjectiveBuilder(
            self.model,
            self.tokenizer,
            self.data.examples,
            steps=self.data.steps,
            precision=self.precision,
            base_digest=self.base_digest,
        )
        return builder.build(self.config.objective)

    def _exact_match_on(self, questions: list[Question]) -> Callable[[], Metrics]:
        limit = self.config.eval.max_new_tokens
        return lambda: exact_match(
            self.model, self.tokenizer, questions, max_tokens=limit, pause=self.trainer.pause_point
        ).metrics()

    def _own_callbacks(self, test: EvaluationSplit | None) -> list[Callback]:
        config = self.config
        own: list[Callback] = [MetricsLogger(self.directory / "metrics.jsonl", every=config.log.every)]
        own.append(_Description(self.directory, self.description))
        own.append(_FinalAtEnd(self._write_final))
        if test is not None:
            own.append(_TestAtEnd(test.batches, self._exact_match_on(test.questions)))
        if self.quality:
            own += [Gluing(), QualitySummary(self.model.spec, self.directory)]
        if (early := config.eval.early_stop) is not None:
            own.append(EarlyStopping(early.metric, patience=early.patience, min_delta=early.min_delta))
        if config.run.max_memory is not None:
            own.append(MemoryLimit(config.run.max_memory))
        if config.run.max_time is not None:
            own.append(TimeLimit(config.run.max_time))
        return own

    def _describe(self) -> dict[str, str]:
        """What this run is, as the files beside it."""
        self.origins = provenance(self.data.digests(), self.base_digest)
        described = {"fingerprint": self.model.fingerprint, "architecture": self.model.describe()}
        if self.quality:
            described = architecture(self.model.spec)
        return {
            "config.yaml": to_yaml(self.config),
            "arch.json": json.dumps(described, indent=2) + "\n",
            "provenance.json": json.dumps(self.origins, indent=2) + "\n",
        }

    def _write_description(self) -> None:
        """Before the first step, so that even a failed run can be understood; all of it or nothing."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be made: {error.strerror}") from error
        with new_directory(self.directory.resolve()) as staging:
            if isinstance(self.config.model, Preset):
                self.tokenizer.save_pretrained(staging / "tokenizer")
            for name, text in self.description.items():
                write_text(staging / name, text)

    def _write_final(self) -> None:
        """`final/`: what people use. After early stopping the trainer has put the best weights back."""
        final = self.directory / "final"
        if final.is_dir():
            return  # the run was killed between its result and its summary
        if self.quality:
            write_final(self.trainer, self.directory)
            return
        if self.config.method.kind == "full":
            save(self.model, self.tokenizer, final)
            return
        base = None
        if self.model.name is None:  # an adapter was folded in: these weights are nowhere else
            base = self.directory / BASE
            if not base.exists():
                save_base(self.model, self.tokenizer, base)
        save_adapter(self.model, final, tokenizer=self.tokenizer, base=base)


class _Description(Injector):
    """The files that say what a run is, put back where somebody removed them: without them no resume."""

    def __init__(self, directory: Path, files: dict[str, str]) -> None:
        self.directory = directory
        self.files = files

    def on_save(self, step: int, path: Path) -> None:
        """Beside every checkpoint."""
        with contextlib.suppress(StorageError):  # the next save tries again
            for name, text in self.files.items():
                if not (self.directory / name).exists():
                    replace_text(self.directory / name, text)


class _FinalAtEnd(Injector):
    """`final/`, written before anything else at the end can fail."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.write = write

    def on_train_end(self, result: RunResult) -> None:
        """Write what a finished run came to."""
        if not result.unfinished:
            self.write()


class _TestAtEnd(Injector):
    """The test set, evaluated once, into the summary."""

    def __init__(self, batches: list[Batch], exact_match_on_test: Callable[[], Metrics]) -> None:
        self.batches = batches
        self.exact_match_on_test = exact_match_on_test

    def on_train_begin(self, run: Trainer) -> None:
        """Remember who evaluates."""
        self.run = run

    def on_train_end(self, result: RunResult) -> None:
        """Evaluate a finished run on its test records."""
        if not result.unfinished:
            try:
                loss = {name.removeprefix("eval_"): v for name, v in self.run.evaluate(self.batches).items()}
                result.summary["test"] = loss | self.exact_match_on_test()
            except EvaluationStoppedError:
                log.warning("the test records were not evaluated to the end; whet eval does it")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
