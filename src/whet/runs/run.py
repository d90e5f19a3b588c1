"""Train and resume runs: the functions behind `whet.train` and `whet.resume`.

`train` and `resume` decide what to run: a new run directory, or an existing one and the checkpoint to resume
from. `_Run.execute` then does the same work for both, stage by stage:

1. Assemble the run: data, models, objective and training steps (`runs/assemble.py`).
2. Distribute the model over the ranks.
3. Check that a resumed run still has the inputs that it started with.
4. Build the Trainer with all callbacks and evaluators.
5. Create or open the run directory, and restore the checkpoint.
6. Train.
7. Write `final/`, evaluate the test split, write the model card, and let callbacks write the summary.
"""

import contextlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from whet.config.checks.unread_keys import unused_key_messages
from whet.config.load_config import ConfigLike, load_config, to_yaml
from whet.config.run_config import RunConfig
from whet.data.run_data import EvaluationSplit
from whet.error_boundary import invalid_input_errors, out_of_memory_hints
from whet.errors import CheckpointError, ConfigError, StorageError
from whet.given.binding import bind_config, check_given
from whet.given.given import Given
from whet.models.language_model import LanguageModel
from whet.parallel.fsdp import TENSOR, device_mesh, local_nbytes, shard_model
from whet.parallel.preflight import (
    apply_parallel_config,
    broadcast_parameters,
    check_equal_on_ranks,
    seed_rank,
)
from whet.parallel.process_group import World, distributed_world, was_restarted
from whet.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from whet.recipes.registry import complete_config
from whet.run_directory import (
    CHECKPOINTS_DIRECTORY,
    CONFIG_FILE,
    FINAL_DIRECTORY,
    LOG_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
    STATE_FILE,
    count_logged_steps,
    is_finished,
    move_superseded_rows,
)
from whet.runs.assemble import Assembly, assemble
from whet.runs.build_callbacks import callbacks_from_config, task_evaluator
from whet.runs.provenance import collect_provenance
from whet.runs.resume_checks import (
    check_config_unchanged,
    check_directory_is_free,
    check_inputs_unchanged,
    check_is_run,
    is_run_of_config,
    warn_about_missing_rows,
)
from whet.runs.run_log import RunLog
from whet.runs.signals import StopOnSignal
from whet.storage import (
    create_directory,
    create_directory_atomically,
    lock_directory,
    remove_directory,
    remove_temporary_files,
    replace_text,
    write_text,
)
from whet.training.callbacks import Callback, EvaluationStoppedError, Injector
from whet.training.checkpoint import newest_valid_checkpoint, prune_checkpoints, read_checkpoint_state
from whet.training.early_stopping import EarlyStopping
from whet.training.observe.metrics_logger import MetricsLogger
from whet.training.state import RunResult
from whet.training.trainer import Trainer

log = logging.getLogger("whet")


def train(config: ConfigLike, callbacks: Iterable[Callback] = (), given: Given | None = None) -> RunResult:
    """Train a new run, from its first step to `final/`.

    A process that was restarted after a failure resumes the run if it already exists.

    Args:
        config: A mapping, the path of a YAML file, or a `RunConfig`.
        callbacks: Called after whet's own callbacks.
        given: Python objects that the config refers to: records, reward functions, metrics, an objective.
    """
    given = given or Given()
    config = complete_config(bind_config(config, given))
    directory = config.directory
    if was_restarted() and is_run_of_config(config, directory):
        return resume(directory, callbacks, given)
    with distributed_world() as group, StopOnSignal() as stop_on_signal, RunLog(log) as run_log:
        world = apply_parallel_config(group, config)
        with world.sync_errors():  # an error on rank 0 is raised on all ranks
            if world.is_main:
                check_directory_is_free(directory)
                remove_temporary_files(directory.parent, only_name=directory.name)
                for line in unused_key_messages(config):
                    log.warning("%s", line)
        run = _Run(config, directory, run_log, world, given)
        return run.execute([stop_on_signal, *callbacks])


def resume(
    directory: str | Path, callbacks: Iterable[Callback] = (), given: Given | None = None
) -> RunResult:
    """Resume a run from its newest valid checkpoint, or restart it if it has no checkpoint.

    Args:
        directory: The run directory.
        callbacks: Called after whet's own callbacks.
        given: The same Python objects that the run was started with.
    """
    directory = Path(directory)
    check_is_run(directory)
    config = load_config(directory / CONFIG_FILE)
    given = given or Given()
    check_given(config, given, directory)
    with (
        distributed_world() as group,
        StopOnSignal() as stop_on_signal,
        RunLog(log) as run_log,
        contextlib.ExitStack() as stack,
    ):
        world, checkpoint = apply_parallel_config(group, config), None
        with world.sync_errors():  # an error on rank 0 is raised on all ranks
            if world.is_main:
                stack.enter_context(lock_directory(directory))
                checkpoint = _checkpoint_to_resume(directory, config)
        run = _Run(config, directory, run_log, world, given)
        path = world.broadcast(None if checkpoint is None else str(checkpoint))
        checkpoint = None if path is None else Path(path)
        return run.execute([stop_on_signal, *callbacks], checkpoint=checkpoint, is_resumed=True)


def _checkpoint_to_resume(directory: Path, config: RunConfig) -> Path | None:
    """Return the newest valid checkpoint, or None if the run has none and has to restart.

    Raises:
        CheckpointError: The run has finished, or keys of its config have changed that a resumed run cannot
            change.
    """
    for part in (directory, directory / CHECKPOINTS_DIRECTORY, directory / FINAL_DIRECTORY):
        remove_temporary_files(part)
    checkpoint = None if is_finished(directory) else newest_valid_checkpoint(directory)
    if checkpoint is not None:
        with invalid_input_errors(f"{checkpoint / STATE_FILE} is damaged", kind=CheckpointError):
            check_config_unchanged(read_checkpoint_state(checkpoint).get("config", {}), config, directory)
        return checkpoint
    if (directory / FINAL_DIRECTORY).is_dir():
        raise CheckpointError(
            f"{directory} has already finished; its result is in {directory / FINAL_DIRECTORY}"
        )
    if steps := count_logged_steps(directory / METRICS_FILE):
        rows = f"moving the metrics rows of {steps} step{'s' * (steps > 1)} to metrics.superseded.jsonl"
        log.info("no checkpoint in %s: restarting from step 1, %s", directory / CHECKPOINTS_DIRECTORY, rows)
    else:
        log.info("%s stopped before its first checkpoint: restarting from step 1", directory)
    return None


class _Run:
    """One run on one rank: everything that a new run and a resumed run have in common."""

    def __init__(
        self, config: RunConfig, directory: Path, run_log: RunLog, world: World, given: Given
    ) -> None:
        self.config = config
        self.directory = directory
        self.run_log = run_log
        self.world = world
        self.given = given

    def execute(
        self, callbacks: Iterable[Callback], *, checkpoint: Path | None = None, is_resumed: bool = False
    ) -> RunResult:
        """Assemble and train the run, write `final/`, and evaluate the test split.

        Args:
            callbacks: Called after whet's own callbacks.
            checkpoint: The checkpoint to resume from.
            is_resumed: Whether the run directory exists already. A resumed run without a checkpoint starts at
                step 1 again.
        """
        with out_of_memory_hints(), contextlib.ExitStack() as stack:
            assembly = assemble(
                self.config, stack, directory=self.directory, world=self.world, given=self.given
            )
            self._distribute(assembly)
            valid, test = (assembly.data.evaluation_split(name, assembly.model) for name in ("valid", "test"))

            provenance_json = self._collect_provenance(assembly)
            if is_resumed:
                self._check_inputs_unchanged(assembly, provenance_json)
            metadata = self._build_metadata_files(assembly, provenance_json)

            # Entered before the metric sinks: the lock is released after they are closed, because they write
            # to the run directory.
            lock_stack = stack.enter_context(contextlib.ExitStack())
            own_callbacks = self._build_callbacks(assembly, metadata, stack)
            trainer = self._build_trainer(assembly, [*own_callbacks, *callbacks], valid)

            self._open_directory(assembly, metadata, lock_stack, is_resumed=is_resumed)
            if checkpoint is not None:
                self._restore_checkpoint(trainer, checkpoint)
            if is_resumed and self.world.is_main:
                self._trim_to_checkpoint(trainer, checkpoint)

            start_step = trainer.state.step
            result = trainer.train()
            if not result.unfinished:
                with self.world.watchdog.long_operation("finishing"):
                    self._write_final(assembly, trainer, start_step=start_step)
                    self._evaluate_restored_tasks(trainer)
                    self._evaluate_test_split(assembly, trainer, test, result)
                    self._write_card(result)
            trainer.end(result)  # callbacks write the summary
            return result

    def _distribute(self, assembly: Assembly) -> None:
        """Check that all ranks have the same model and data, then broadcast or shard the weights."""
        if self.world.size == 1:
            return
        inputs = {
            "base": assembly.build.base_digest,
            "frozen_models": assembly.build.identities,
            **assembly.data.digests(),
            "steps": assembly.stream.state(),
        }
        check_equal_on_ranks(self.world, "model and data", inputs)

        def parameters() -> list[torch.nn.Parameter]:
            heads = assembly.objective.heads or torch.nn.Module()
            return [*assembly.model.parameters(), *heads.parameters()]

        broadcast_parameters(self.world, [p for p in parameters() if p.requires_grad])
        if self.config.parallel.kind == "fsdp":
            self._shard(assembly)
        seed_rank(self.world, self.config.run.seed)
        log.info(
            "parallel: %s on %d processes; a rank has %.1f MiB of weights",
            *(self.config.parallel.kind, self.world.size, local_nbytes(parameters()) / 2**20),
        )

    def _shard(self, assembly: Assembly) -> None:
        """Apply tensor parallelism to the trained model, and FSDP to it and to the frozen models."""
        check_tensor_parallel(assembly.model, self.world.tp_size)
        mesh = device_mesh(self.world, assembly.device)
        apply_tensor_parallel(assembly.model, mesh[TENSOR])
        frozen = [model for model in assembly.build.frozen.values() if isinstance(model, LanguageModel)]
        for model in [assembly.model, *frozen]:
            shard_model(model, mesh, assembly.precision)

    def _collect_provenance(self, assembly: Assembly) -> dict[str, Any]:  # Any: JSON values
        """Return the contents of provenance.json."""
        return collect_provenance(
            assembly.data.digests(),
            assembly.build.base_digest,
            device=assembly.device,
            start_date=assembly.start_date,
            token_digests=assembly.data.token_digests(),
            frozen_models=assembly.build.identities,
            continues=self._continued_adapters(),
        )

    def _continued_adapters(self) -> list[dict[str, Any]]:  # Any: JSON values
        """Return the adapters that this run continues to train, the latest first."""
        if not self.config.method.continues:
            return []
        from whet.model_io.continued_adapter import continued_chain

        return continued_chain(self.config)

    def _check_inputs_unchanged(
        self,
        assembly: Assembly,
        provenance_json: dict[str, Any],  # Any: as above
    ) -> None:
        """Raise a CheckpointError if a resumed run would get other models, records or tokens."""
        inputs = provenance_json | {"fingerprint": assembly.model.fingerprint}
        with invalid_input_errors(f"{self.directory / PROVENANCE_FILE} is damaged", kind=CheckpointError):
            check_inputs_unchanged(self.directory, inputs, str(assembly.model.name))

    def _build_metadata_files(
        self,
        assembly: Assembly,
        provenance_json: dict[str, Any],  # Any: as above
    ) -> dict[str, str]:
        """Return the text files that describe the run, by name: config, provenance, architecture and more."""
        return {
            **assembly.recipe.files(assembly.build),
            CONFIG_FILE: to_yaml(self.config),
            PROVENANCE_FILE: json.dumps(provenance_json, indent=2) + "\n",
        }

    def _build_callbacks(
        self, assembly: Assembly, metadata: dict[str, str], stack: contextlib.ExitStack
    ) -> list[Callback]:
        """Return whet's own callbacks: those of every run, of the recipe, and of the config."""
        config = self.config
        callbacks: list[Callback] = [
            MetricsLogger(self.directory / METRICS_FILE, every=config.log.every),
            _RestoreMetadataFiles(self.directory, metadata),
            *assembly.router_callbacks,
            *assembly.recipe.callbacks(assembly.build),
            *callbacks_from_config(config, self.directory, assembly, stack),
        ]
        if (early := config.eval.early_stop) is not None:
            callbacks.append(EarlyStopping(early.metric, patience=early.patience, min_delta=early.min_delta))
        return callbacks

    def _build_trainer(
        self, assembly: Assembly, callbacks: list[Callback], valid: EvaluationSplit | None
    ) -> Trainer:
        trainer = Trainer(
            assembly.model,
            assembly.objective,
            assembly.stream,
            self.config,
            callbacks,
            total_steps=self._count_steps(assembly),
            eval_batches=valid.batches if valid else (),
            directory=self.directory,
            precision=assembly.precision,
            world=self.world,
        )
        pause = trainer.pause_between_completions
        trainer.evaluators = assembly.recipe.evaluators(assembly.build, "valid", valid, pause)
        self._task_evaluator = task_evaluator(self.config, assembly, self.directory, pause)
        if (evaluator := self._task_evaluator) is not None:
            trainer.evaluators = [
                *trainer.evaluators,
                lambda: evaluator.evaluate(trainer.state.step) if self._evaluates_tasks(trainer) else {},
            ]
        return trainer

    def _evaluates_tasks(self, trainer: Trainer) -> bool:
        step = trainer.state.step
        ends = trainer.stop is not None or trainer.is_last(step)
        return ends or self.config.eval.evaluates_tasks_at(step)

    def _count_steps(self, assembly: Assembly) -> int:
        """Return the total number of steps: run.steps, or the steps of run.epochs epochs."""
        steps = self.config.run.steps
        if steps is None:
            epochs = range(self.config.run.epochs or 0)
            steps = sum(assembly.stream.steps_in(epoch) or 0 for epoch in epochs)
        log.info("steps: %d, each of at most %s", steps, assembly.data.describe_steps())
        return steps

    def _open_directory(
        self,
        assembly: Assembly,
        metadata: dict[str, str],
        lock_stack: contextlib.ExitStack,
        *,
        is_resumed: bool,
    ) -> None:
        """Create and lock the directory of a new run, and write the log to log.txt from now on.

        The directory of a resumed run exists, and `resume` has locked it.
        """
        with self.world.sync_errors():
            if self.world.is_main and not is_resumed:
                self._create_directory(assembly, metadata)
                lock_stack.enter_context(lock_directory(self.directory))
            if self.world.is_main:
                self.run_log.write_to(self.directory / LOG_FILE)

    def _create_directory(self, assembly: Assembly, metadata: dict[str, str]) -> None:
        """Create the run directory with its metadata files in one atomic step.

        It is created before the first step, so that even a failed run can be understood.
        """
        try:
            create_directory(self.directory.parent)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be created: {error.strerror}") from error
        with create_directory_atomically(self.directory.resolve()) as staging:
            assembly.recipe.stage(assembly.build, staging)
            for name, text in metadata.items():
                write_text(staging / name, text)

    def _restore_checkpoint(self, trainer: Trainer, checkpoint: Path) -> None:
        with invalid_input_errors(f"{checkpoint} cannot be restored", kind=CheckpointError):
            trainer.restore(checkpoint)
        log.info("resuming after step %d, from %s", trainer.state.step, checkpoint)

    def _trim_to_checkpoint(self, trainer: Trainer, checkpoint: Path | None) -> None:
        """Move metrics rows from after the checkpoint to another file, and delete surplus checkpoints.

        Without a checkpoint, all rows are moved.
        """
        metrics, state = self.directory / METRICS_FILE, trainer.state
        step = state.step if checkpoint is not None else -1
        move_superseded_rows(metrics, step=step, evaluated_step=state.evaluated_step)
        if checkpoint is not None:
            log_config = read_checkpoint_state(checkpoint).get("config", {}).get("log", {})
            warn_about_missing_rows(metrics, step=step, every=log_config.get("every", self.config.log.every))
            # a process that was killed while it deleted the oldest checkpoint leaves one too many
            prune_checkpoints(self.directory, keep=self.config.checkpoint.keep, best_steps=state.best_steps)

    def _write_final(self, assembly: Assembly, trainer: Trainer, *, start_step: int) -> None:
        """Save the trained model to `final/`, unless a killed attempt of this run has already written it."""
        final = self.directory / FINAL_DIRECTORY
        if self.world.is_main and final.is_dir() and trainer.state.step > start_step:
            remove_directory(final)  # outdated: the run lost its summary, was resumed, and trained further
        if self.world.broadcast(final.is_dir()):
            assembly.recipe.restore_final(assembly.build, final)
            return
        with self.world.watchdog.long_operation("writing final/"):
            assembly.recipe.save_final(assembly.build, trainer, final)
        self.world.barrier()

    def _evaluate_restored_tasks(self, trainer: Trainer) -> None:
        """Evaluate the tasks with the best weights, if early stopping has restored those of another step."""
        best = trainer.state.best
        if self._task_evaluator is None or not trainer.settings.restores_best or best is None:
            return
        try:
            self._task_evaluator.evaluate(best["step"])
        except EvaluationStoppedError:
            log.warning("the evaluation of the tasks was interrupted: run whet eval to repeat it")

    def _evaluate_test_split(
        self, assembly: Assembly, trainer: Trainer, test: EvaluationSplit | None, result: RunResult
    ) -> None:
        """Evaluate the final model on the test split, and add the metrics to the summary."""
        pause = trainer.pause_between_completions
        evaluators = assembly.recipe.evaluators(assembly.build, "test", test, pause)
        if test is None and not evaluators:
            return
        try:
            metrics = trainer.evaluate(test.batches) if test is not None and test.batches else {}
            for evaluator in evaluators:
                metrics |= evaluator()
        except EvaluationStoppedError:
            log.warning("the evaluation of the test split was interrupted: run whet eval to repeat it")
            return
        result.summary["test"] = {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def _write_card(self, result: RunResult) -> None:
        """Write the model card: before the summary, so that a run with a summary has one."""
        from whet.runs.model_card import write_final_card

        with self.world.sync_errors():
            if self.world.is_main:
                write_final_card(self.directory, result.summary)


class _RestoreMetadataFiles(Injector):
    """Write deleted metadata files back at every checkpoint, because a resume needs them."""

    def __init__(self, directory: Path, files: dict[str, str]) -> None:
        self.directory = directory
        self.files = files

    def on_save(self, step: int, path: Path) -> None:
        """Write the files that are missing from the run directory."""
        with contextlib.suppress(StorageError):  # the next save tries again
            for name, text in self.files.items():
                if not (self.directory / name).exists():
                    replace_text(self.directory / name, text)
