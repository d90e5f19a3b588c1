"""A run, assembled from its config: `whet.train` and `whet.resume`."""

import contextlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from whet.config.checks.unread_keys import unread_lines
from whet.config.load_config import ConfigLike, load_config, to_yaml
from whet.config.run_config import RunConfig
from whet.data.run_data import EvaluationSplit
from whet.error_boundary import memory_knobs_named, wrong_input
from whet.errors import CheckpointError, ConfigError, StorageError
from whet.given.binding import bind_config, check_given
from whet.given.given import Given
from whet.models.language_model import LanguageModel
from whet.parallel.fsdp import TENSOR, device_mesh, local_bytes_of, shard
from whet.parallel.preflight import agreed, refuse_differences, seed_rank, start_alike
from whet.parallel.process_group import World, joined, was_restarted
from whet.parallel.tensor_parallel import cut_layers, refuse_uncuttable
from whet.run_directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    FINAL,
    LOG_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
    STATE_FILE,
    is_finished,
    set_aside_later_rows,
    steps_with_rows,
)
from whet.runs.assemble import Assembly, assemble
from whet.runs.build_callbacks import watchers
from whet.runs.provenance import provenance
from whet.runs.resume_checks import (
    is_run_of,
    refuse_changes,
    refuse_other_origins,
    refuse_other_than_run,
    refuse_taken_name,
    warn_of_missing_rows,
)
from whet.runs.run_log import RunLog
from whet.runs.signals import StopOnSignal
from whet.storage import (
    clear_leftovers,
    locked,
    make_directory,
    new_directory,
    remove_directory,
    replace_text,
    write_text,
)
from whet.training.callbacks import Callback, EvaluationStoppedError, Injector
from whet.training.checkpoint import newest_valid, prune, read_state
from whet.training.early_stopping import EarlyStopping
from whet.training.observe.metrics_logger import MetricsLogger
from whet.training.state import RunResult
from whet.training.trainer import Trainer

log = logging.getLogger("whet")


def train(config: ConfigLike, callbacks: Iterable[Callback] = (), given: Given | None = None) -> RunResult:
    """Run a config, with the objects `given` beside it, from its first step to `final/`."""
    given = given or Given()
    config = bind_config(config, given)
    directory = config.directory
    if was_restarted() and is_run_of(config, directory):
        return resume(directory, callbacks, given)
    with joined() as group, StopOnSignal() as signals, RunLog(log) as run_log:
        world = agreed(group, config)
        with world.abreast():
            if world.is_main:
                refuse_taken_name(directory)
                clear_leftovers(directory.parent, of=directory.name)
                for line in unread_lines(config):
                    log.warning("%s", line)
        return _Run(config, directory, run_log, world, given).go([signals, *callbacks])


def resume(
    directory: str | Path, callbacks: Iterable[Callback] = (), given: Given | None = None
) -> RunResult:
    """Resume a run from its newest whole checkpoint, with the same objects `given` as before."""
    directory = Path(directory)
    refuse_other_than_run(directory)
    config = load_config(directory / CONFIG_FILE)
    given = given or Given()
    check_given(config, given, directory)
    with joined() as group, StopOnSignal() as signals, RunLog(log) as run_log, contextlib.ExitStack() as held:
        world, checkpoint = agreed(group, config), None
        with world.abreast():
            if world.is_main:
                held.enter_context(locked(directory))
                checkpoint = _where_to_go_on(directory, config)
        run = _Run(config, directory, run_log, world, given)
        chosen = world.from_main(None if checkpoint is None else str(checkpoint))
        checkpoint = None if chosen is None else Path(chosen)
        return run.go([signals, *callbacks], checkpoint=checkpoint, again=True)


def _where_to_go_on(directory: Path, config: RunConfig) -> Path | None:
    """The checkpoint to resume from; None where the run was stopped before its first."""
    clear_leftovers(directory)
    clear_leftovers(directory / CHECKPOINTS)
    checkpoint = None if is_finished(directory) else newest_valid(directory)
    if checkpoint is None and (directory / FINAL).is_dir():
        raise CheckpointError(f"{directory} has finished: its result is in {directory / FINAL}")
    if checkpoint is None:
        steps = steps_with_rows(directory / METRICS_FILE)
        if steps:
            rows = f"the rows of {steps} step{'s' * (steps > 1)} move to metrics.superseded.jsonl"
            log.info("no checkpoint in %s: starting over; %s", directory / CHECKPOINTS, rows)
        else:
            log.info("%s was stopped before its first checkpoint: starting over", directory)
    else:
        with wrong_input(f"{checkpoint / STATE_FILE} is damaged", kind=CheckpointError):
            refuse_changes(read_state(checkpoint).get("config", {}), config, directory)
    return checkpoint


class _Run:
    """One run, from its assembly to its summary."""

    def __init__(
        self, config: RunConfig, directory: Path, run_log: RunLog, world: World, given: Given
    ) -> None:
        self.config = config
        self.directory = directory
        self.run_log = run_log
        self.world = world
        self.given = given

    def go(
        self, callbacks: Iterable[Callback], *, checkpoint: Path | None = None, again: bool = False
    ) -> RunResult:
        """Assemble, train (`again`: a run that was begun before), write `final/`, test, and summarise."""
        with memory_knobs_named(), contextlib.ExitStack() as held:
            run = assemble(self.config, held, directory=self.directory, world=self.world, given=self.given)
            self._distribute(run)
            valid, test = (run.data.split(name, run.model) for name in ("valid", "test"))
            origins = self._origins(run)
            if again:
                known = origins | {"fingerprint": run.model.fingerprint}
                with wrong_input(f"{self.directory / PROVENANCE_FILE} is damaged", kind=CheckpointError):
                    refuse_other_origins(self.directory, known, str(run.model.name))
            description = self._describe(run, origins)
            lock = held.enter_context(contextlib.ExitStack())  # released after sinks, which write there
            trainer = Trainer(
                run.model,
                run.objective,
                run.stream,
                self.config,
                [*self._own_callbacks(run, description, held), *callbacks],
                total_steps=self._count_steps(run),
                eval_batches=valid.batches if valid else (),
                directory=self.directory,
                precision=run.precision,
                world=self.world,
            )
            pause = trainer.pause_between_answers
            trainer.evaluators = run.recipe.evaluators(run.build, "valid", valid, pause)
            self._open_directory(run, description, lock, again=again)
            if checkpoint is not None:
                with wrong_input(f"{checkpoint} cannot be restored", kind=CheckpointError):
                    trainer.restore(checkpoint)
                log.info("resuming after step %d, from %s", trainer.state.step, checkpoint)
            began_after = trainer.state.step
            if again and self.world.is_main:
                self._tidy(trainer, checkpoint)

            result = trainer.train()
            if not result.unfinished:
                with self.world.watch.patiently("finishing"):
                    self._write_final(run, trainer, began_after=began_after)
                    self._test(run, trainer, test, result)
            trainer.end(result)
            return result

    def _distribute(self, run: Assembly) -> None:
        """Make sure that all ranks are about to train the same thing, and let them train it together."""
        if self.world.size == 1:
            return
        known = {
            "base": run.build.base_digest,
            "others": run.build.identities,
            **run.data.digests(),
            "steps": run.stream.state(),
        }
        refuse_differences(self.world, "model and data", known)

        def learned() -> list[torch.nn.Parameter]:
            return [*run.model.parameters(), *(run.objective.heads or torch.nn.Module()).parameters()]

        start_alike(self.world, [p for p in learned() if p.requires_grad])
        if self.config.parallel.kind == "fsdp":
            self._shard(run)
        seed_rank(self.world, self.config.run.seed)
        log.info(
            "parallel: %s on %d processes; a rank has %.1f MiB of weights",
            *(self.config.parallel.kind, self.world.size, local_bytes_of(learned()) / 2**20),
        )

    def _shard(self, run: Assembly) -> None:
        refuse_uncuttable(run.model, self.world.tensor)
        mesh = device_mesh(self.world, run.device)
        cut_layers(run.model, mesh[TENSOR])
        frozen = [model for model in run.build.frozen.values() if isinstance(model, LanguageModel)]
        for model in [run.model, *frozen]:
            shard(model, mesh, run.precision)

    def _origins(self, run: Assembly) -> dict[str, Any]:  # Any: JSON values
        """Return what the run is made from: code, data, models and devices."""
        return provenance(
            run.data.digests(),
            run.build.base_digest,
            device=run.device,
            began=run.began,
            tokens=run.data.token_digests(),
            others=run.build.identities,
        )

    def _describe(self, run: Assembly, origins: dict[str, Any]) -> dict[str, str]:  # Any: as above
        """Return the files that say what this run is, by name."""
        return {
            **run.recipe.files(run.build),
            CONFIG_FILE: to_yaml(self.config),
            PROVENANCE_FILE: json.dumps(origins, indent=2) + "\n",
        }

    def _own_callbacks(
        self, run: Assembly, description: dict[str, str], held: contextlib.ExitStack
    ) -> list[Callback]:
        config = self.config
        own: list[Callback] = [
            MetricsLogger(self.directory / METRICS_FILE, every=config.log.every),
            _Description(self.directory, description),
            *run.routers,
            *run.recipe.callbacks(run.build),
            *watchers(config, self.directory, run, held),
        ]
        if (early := config.eval.early_stop) is not None:
            own.append(EarlyStopping(early.metric, patience=early.patience, min_delta=early.min_delta))
        return own

    def _count_steps(self, run: Assembly) -> int:
        steps = self.config.run.steps
        if steps is None:
            epochs = range(self.config.run.epochs or 0)
            steps = sum(run.stream.steps_in(epoch) or 0 for epoch in epochs)
        log.info("steps: %d, each of at most %s", steps, run.data.describe_steps())
        return steps

    def _open_directory(
        self, run: Assembly, description: dict[str, str], lock: contextlib.ExitStack, *, again: bool
    ) -> None:
        """Write what describes a new run, lock its directory, and keep its log there."""
        with self.world.abreast():
            if self.world.is_main and not again:
                self._write_description(run, description)
                lock.enter_context(locked(self.directory))
            if self.world.is_main:
                self.run_log.keep_in(self.directory / LOG_FILE)

    def _write_description(self, run: Assembly, description: dict[str, str]) -> None:
        """Before the first step, so that even a failed run can be understood; all of it or nothing."""
        try:
            make_directory(self.directory.parent)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be made: {error.strerror}") from error
        with new_directory(self.directory.resolve()) as staging:
            run.recipe.stage(run.build, staging)
            for name, text in description.items():
                write_text(staging / name, text)

    def _tidy(self, trainer: Trainer, checkpoint: Path | None) -> None:
        """Leave of a run that is resumed what its checkpoint knows of."""
        metrics, state = self.directory / METRICS_FILE, trainer.state
        step = state.step if checkpoint is not None else -1
        set_aside_later_rows(metrics, step=step, evaluated_step=state.evaluated_step)
        if checkpoint is not None:
            began = read_state(checkpoint).get("config", {}).get("log", {})
            warn_of_missing_rows(metrics, step=step, every=began.get("every", self.config.log.every))
            # a process that ended while it removed the oldest has left one too many
            prune(self.directory, keep=self.config.checkpoint.keep, best_steps=state.best_steps)

    def _write_final(self, run: Assembly, trainer: Trainer, *, began_after: int) -> None:
        final = self.directory / FINAL
        if self.world.is_main and final.is_dir() and trainer.state.step > began_after:
            remove_directory(final)  # of a run whose summary is lost, and which was resumed
        if self.world.from_main(final.is_dir()):  # killed between its result and its summary
            run.recipe.restore_final(run.build, final)
            return
        with self.world.watch.patiently("writing final/"):
            run.recipe.save_final(run.build, trainer, final)
        self.world.barrier()

    def _test(self, run: Assembly, trainer: Trainer, test: EvaluationSplit | None, result: RunResult) -> None:
        """Evaluate a finished run on its test records, into its summary."""
        evaluators = run.recipe.evaluators(run.build, "test", test, trainer.pause_between_answers)
        if test is None and not evaluators:
            return
        try:
            metrics = trainer.evaluate(test.batches) if test is not None and test.batches else {}
            for evaluator in evaluators:
                metrics |= evaluator()
        except EvaluationStoppedError:
            log.warning("the test records were not evaluated to the end; whet eval does it")
            return
        result.summary["test"] = {name.removeprefix("eval_"): value for name, value in metrics.items()}


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
