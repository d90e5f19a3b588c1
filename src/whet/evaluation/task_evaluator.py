"""Benchmark tasks during a run (`eval.tasks`): metrics of evaluations, and results in evaluations.jsonl."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.config.eval import BenchmarkTasks, EarlyStop
from whet.config.metric_direction import lower_is_better
from whet.errors import ConfigError, StorageError, prefix_errors
from whet.evaluation.benchmarks import LoadedTasks, TaskSettings, load_tasks, run_tasks
from whet.evaluation.task_result import TaskResult, append_result, read_results
from whet.models.language_model import LanguageModel
from whet.parallel.process_group import SINGLE_PROCESS, World

log = logging.getLogger("whet")

_BOOTSTRAP = 1000  # resamples for standard errors without a formula, in one process: a run must not fork


def load_run_tasks(section: BenchmarkTasks, early_stop: EarlyStop | None) -> LoadedTasks:
    """Return the tasks of `eval.tasks`.

    Raises:
        ConfigError: the extra is not installed, a task is unknown or cannot be loaded, or early stopping
            would watch a metric in the wrong direction.
    """
    with prefix_errors("eval.tasks"):
        loaded = load_tasks(section.names)
    for name, task in loaded.tasks.items():
        for metric, is_higher_better in task.higher_is_better().items():
            watched = early_stop is not None and early_stop.metric.startswith(metric_name(name, metric))
            if watched and early_stop is not None and is_higher_better is lower_is_better(early_stop.metric):
                direction = "higher" if is_higher_better else "lower"
                raise ConfigError(
                    f"eval.early_stop: {direction} is better for {early_stop.metric}, but its name says the "
                    "opposite",
                    hint="choose another metric, or rename the metric of the task",
                )
    return loaded


def metric_name(task: str, metric: str) -> str:
    """Return the name of a task's metric in the metrics of a run: eval_TASK_METRIC."""
    return "_".join(["eval", *(re.sub(r"[^A-Za-z0-9_-]+", "_", part) for part in (task, metric))])


class TaskEvaluator:
    """Evaluates a model on benchmark tasks while it is trained, without changing the run.

    The requests are distributed over the ranks. Rank 0 appends new results to evaluations.jsonl.

    Args:
        loaded: the tasks.
        section: how they are run.
        model: the trained model.
        tokenizer: its tokenizer.
        directory: the run directory.
        pause: called often; it may raise to abort the evaluation.
        world: the processes of the run.
    """

    def __init__(
        self,
        loaded: LoadedTasks,
        section: BenchmarkTasks,
        *,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        directory: Path,
        pause: Callable[[], None] = lambda: None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.loaded = loaded
        self.settings = TaskSettings(section.limit, section.shots, section.chat, bootstrap=_BOOTSTRAP)
        self.model, self.tokenizer = model, tokenizer
        self.directory = directory
        self.pause = pause
        self.world = world

    def evaluate(self, step: int) -> dict[str, float]:
        """Return eval_TASK_METRIC of all tasks and groups, and store their results with the step.

        A result that is stored already is not computed again, and appended only if a newer one with the same
        settings exists: the last one is that of the current weights.
        """
        with self.world.watchdog.long_operation("evaluating tasks"):
            return self._evaluate(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        stored = read_results(self.directory) if self.world.is_main else []
        latest = {_setting(result): result.key for result in stored}
        metrics: dict[str, float] = {}
        for result, _ in run_tasks(
            self.model,
            self.tokenizer,
            self.loaded,
            settings=self.settings,
            stored=stored,
            progress=lambda *_: self.pause(),
            world=self.world,
        ):
            metrics |= {metric_name(result.task, name): score.value for name, score in result.scores.items()}
            if self.world.is_main and latest.get(_setting(result)) != result.key:
                self._append(replace(result, step=step))
        return metrics

    def _append(self, result: TaskResult) -> None:
        try:
            append_result(self.directory, result)
        except StorageError as error:
            log.warning("%s; this result of %s is lost", error.message, result.task)


def _setting(result: TaskResult) -> tuple[str, int, int | None, bool]:
    return result.task, result.shots, result.limit, result.chat
