"""A run, assembled from its config: `whet.train` and `whet.resume`."""

import contextlib
import json
import logging
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from whet.config.checks.unread_keys import unread_lines
from whet.config.load_config import ConfigLike, load_config, to_yaml
from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.data.run_data import EvaluationSplit
from whet.error_boundary import memory_knobs_named, wrong_input
from whet.errors import CheckpointError, ConfigError, StorageError
from whet.given.binding import bind_config, check_given
from whet.given.given import Given
from whet.parallel.fsdp import TENSOR, device_mesh, local_bytes_of, shard
from whet.parallel.preflight import agreed, check_device, refuse_differences, seed_rank, start_alike
from whet.parallel.process_group import SOLO, World, joined, was_restarted
from whet.parallel.tensor_parallel import cut_layers, refuse_uncuttable
from whet.recipes.recipe import Recipe
from whet.recipes.registry import recipe_for
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
from whet.runs.build_callbacks import check_watching, watchers
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
from whet.training.limits import MemoryLimit, TimeLimit
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
        return _Assembly(config, directory, run_log, world, given).go([signals, *callbacks])


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
        assembly = _Assembly(config, directory, run_log, world, given)
        chosen = world.from_main(None if checkpoint is None else str(checkpoint))
        checkpoint = None if chosen is None else Path(chosen)
        return assembly.go([signals, *callbacks], checkpoint=checkpoint, again=True)


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


@contextlib.contextmanager
def assembled(config: RunConfig) -> Iterator[Recipe]:
    """The model, the objective and the steps of a run, for those who want to look at them."""
    work = recipe_for(config, config.directory)
    _seed(config.run.seed)
    with contextlib.ExitStack() as held:
        work.build(held)
        yield work


class _Assembly:
    """A run: its recipe, the trainer, and the files that say what it is."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        run_log: RunLog,
        world: World = SOLO,
        given: Given | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.run_log = run_log
        check_watching(config)
        self.world = world
        self.work = recipe_for(config, directory, world, given)
        check_device(world, self.work.device)

    def go(
        self, callbacks: Iterable[Callback], *, checkpoint: Path | None = None, again: bool = False
    ) -> RunResult:
        """Build, train (`again`: a run that was begun before), and leave something people can use."""
        work = self.work
        with memory_knobs_named(), contextlib.ExitStack() as held:
            _seed(self.config.run.seed)
            work.build(held)
            self._spread()
            valid, test = (work.data.split(name, work.model) for name in ("valid", "test"))
            self.description = self._describe()
            if again:
                found = self.origins | {"fingerprint": work.model.fingerprint}
                with wrong_input(f"{self.directory / PROVENANCE_FILE} is damaged", kind=CheckpointError):
                    refuse_other_origins(self.directory, found, str(work.model.name))
            lock = held.enter_context(contextlib.ExitStack())  # let go of after sinks, which write there
            self.trainer = trainer = Trainer(
                work.model,
                work.objective,
                work.stream,
                self.config,
                [*self._own_callbacks(test, held), *callbacks],
                total_steps=self._count_steps(),
                eval_batches=valid.batches if valid else (),
                evaluators=work.evaluators("valid", valid, self._pause),
                directory=self.directory,
                precision=work.precision,
                world=self.world,
            )
            with self.world.abreast():
                if self.world.is_main and not again:
                    self._write_description()
                    lock.enter_context(locked(self.directory))
                if self.world.is_main:
                    self.run_log.keep_in(self.directory / LOG_FILE)
            if checkpoint is not None:
                with wrong_input(f"{checkpoint} cannot be restored", kind=CheckpointError):
                    trainer.restore(checkpoint)
                log.info("resuming after step %d, from %s", trainer.state.step, checkpoint)
            self.began_after = trainer.state.step
            if again and self.world.is_main:
                self._tidy(checkpoint)
            result = trainer.train()
            if not result.unfinished:
                with self.world.watch.patiently("finishing"):
                    self._write_final()
                    if test is not None or self.judges:
                        self._test(result, test.batches if test else [])
            trainer.end(result)
            return result

    def _test(self, result: RunResult, batches: list[Batch]) -> None:
        """Evaluate a finished run on its test records, into its summary."""
        try:
            metrics = self.trainer.evaluate(batches) if batches else {}
            for judge in self.judges:
                metrics |= judge()
        except EvaluationStoppedError:
            log.warning("the test records were not evaluated to the end; whet eval does it")
            return
        result.summary["test"] = {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def _tidy(self, checkpoint: Path | None) -> None:
        """Leave of a run that is resumed what its checkpoint knows of."""
        metrics, state = self.directory / METRICS_FILE, self.trainer.state
        step = state.step if checkpoint is not None else -1
        set_aside_later_rows(metrics, step=step, evaluated_step=state.evaluated_step)
        if checkpoint is not None:
            began = read_state(checkpoint).get("config", {}).get("log", {})
            warn_of_missing_rows(metrics, step=step, every=began.get("every", self.config.log.every))
            # a process that ended while it removed the oldest has left one too many
            prune(self.directory, keep=self.config.checkpoint.keep, best_steps=state.best_steps)

    def _spread(self) -> None:
        """Make sure that all ranks are about to train the same thing, and let them train it together."""
        if self.world.size == 1:
            return
        work = self.work
        known = {
            "base": work.base_digest,
            "others": work.identities,
            **work.data.digests(),
            "steps": work.stream.state(),
        }
        refuse_differences(self.world, "model and data", known)

        def learned() -> list[torch.nn.Parameter]:
            return [*work.model.parameters(), *(work.objective.heads or torch.nn.Module()).parameters()]

        start_alike(self.world, [p for p in learned() if p.requires_grad])
        if self.config.parallel.kind == "fsdp":
            self._shard()
        seed_rank(self.world, self.config.run.seed)
        log.info(
            "parallel: %s on %d processes; a rank has %.1f MiB of weights",
            *(self.config.parallel.kind, self.world.size, local_bytes_of(learned()) / 2**20),
        )

    def _shard(self) -> None:
        refuse_uncuttable(self.work.model, self.world.tensor)
        mesh = device_mesh(self.world, self.work.device)
        cut_layers(self.work.model, mesh[TENSOR])
        for model in [self.work.model, *self.work.frozen_models()]:
            shard(model, mesh, self.work.precision)

    def _pause(self) -> None:
        if self.world.tensor > 1:  # ranks that generate together stop together: afterwards
            self.world.watch.doing("generating")
        else:
            self.trainer.pause_point()

    def _count_steps(self) -> int:
        run, stream = self.config.run, self.work.stream
        steps: int = run.steps or sum(stream.steps_in(epoch) for epoch in range(run.epochs or 0))
        log.info("steps: %d, each of at most %s", steps, self.work.data.describe_steps())
        return steps

    def _own_callbacks(self, test: EvaluationSplit | None, held: contextlib.ExitStack) -> list[Callback]:
        config = self.config
        own: list[Callback] = [
            MetricsLogger(self.directory / METRICS_FILE, every=config.log.every),
            _Description(self.directory, self.description),
            *self.work.callbacks(self._pause),
            *watchers(config, self.directory, self.work, held),
        ]
        self.judges = self.work.evaluators("test", test, self._pause)
        if (early := config.eval.early_stop) is not None:
            own.append(EarlyStopping(early.metric, patience=early.patience, min_delta=early.min_delta))
        if config.run.max_memory is not None:
            own.append(MemoryLimit(config.run.max_memory))
        if config.run.max_time is not None:
            own.append(TimeLimit(config.run.max_time))
        return own

    def _describe(self) -> dict[str, str]:
        """What this run is, as the files beside it."""
        work = self.work
        self.origins = provenance(
            work.data.digests(),
            work.base_digest,
            device=work.device,
            began=work.began,
            tokens=work.data.token_digests(),
            others=work.identities,
        )
        return {
            **self.work.files(),
            CONFIG_FILE: to_yaml(self.config),
            PROVENANCE_FILE: json.dumps(self.origins, indent=2) + "\n",
        }

    def _write_description(self) -> None:
        """Before the first step, so that even a failed run can be understood; all of it or nothing."""
        try:
            make_directory(self.directory.parent)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be made: {error.strerror}") from error
        with new_directory(self.directory.resolve()) as staging:
            self.work.stage(staging)
            for name, text in self.description.items():
                write_text(staging / name, text)

    def _write_final(self) -> None:
        final = self.directory / FINAL
        if self.world.is_main and final.is_dir() and self.trainer.state.step > self.began_after:
            remove_directory(final)  # of a run whose summary is lost, and which has gone on
        # else: killed between its result and its summary
        if not self.world.from_main(final.is_dir()):
            with self.world.watch.patiently("writing final/"):
                self.work.write_final(self.trainer)
            self.world.barrier()


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


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
