"""Benchmark tasks of lm-evaluation-harness: load them and run them.

A result has a key: a hash of the weights, the task, its items and the settings. A task with a stored result
of the same key is not computed again.
"""

import contextlib
import difflib
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.error_boundary import error_text
from whet.errors import ConfigError, WhetError
from whet.evaluation.task_groups import GroupObject, group_results
from whet.evaluation.task_result import Score, TaskResult, parse_results
from whet.model_io.fingerprints import weights_digest
from whet.models.language_model import LanguageModel
from whet.parallel.fsdp import gathered_parameters
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.training.callbacks import EvaluationStoppedError

EXTRA_HINT = 'pip install "whet[evals]"'
_GROUP = re.compile(r"^group\s*:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)
_MAX_SUGGESTIONS = 3
DEFAULT_BOOTSTRAP = 100_000  # resamples; that of the harness, which computes so many in several processes

TaskObject = Any  # Any: a task of the harness, which has no types
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks and groups of the harness, by name."""

    tasks: Mapping[str, TaskObject]  # also those of the groups
    groups: Mapping[str, GroupObject]


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are run.

    Args:
        limit: the number of items per task. None: all.
        shots: the number of examples in each prompt. None: that of the task.
        chat: whether prompts are rendered with the model's chat template.
        bootstrap: the number of resamples for standard errors without a formula.
    """

    limit: int | None = None
    shots: int | None = None
    chat: bool = False
    bootstrap: int = DEFAULT_BOOTSTRAP

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, not {self.limit}")
        if self.shots is not None and self.shots < 0:
            raise ConfigError(f"shots must be at least 0, not {self.shots}")


def run_tasks(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    loaded: LoadedTasks,
    *,
    settings: TaskSettings,
    stored: Sequence[TaskResult] = (),
    progress: Progress = lambda *_: None,
    world: World = SINGLE_PROCESS,
) -> Iterator[tuple[TaskResult, bool]]:
    """Yield the result of each task, then the total of each group, and whether it is new.

    Args:
        model: the model to evaluate.
        tokenizer: its tokenizer.
        loaded: tasks and groups, as `load_tasks` returns them.
        settings: how the tasks are run.
        stored: results that are not computed again; only those of rank 0 count.
        progress: called with what is computed, the number of finished requests, and their total. It may raise
            EvaluationStoppedError.
        world: the processes that share the requests; all of them must call this.

    Raises:
        ConfigError: a task fails.
    """
    from whet.evaluation.harness import HarnessModel

    with gathered_parameters(model):
        weights = world.broadcast(weights_digest(model))
    known = {result.key: result for result in stored}
    harness_model = HarnessModel(model, tokenizer, progress=progress, world=world)
    results: dict[str, TaskResult] = {}
    for name, task in loaded.tasks.items():
        if settings.chat and not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template", hint="run the tasks without --chat")
        key = result_key(task, weights=weights, settings=settings)
        result = known.get(key)
        if is_new := world.broadcast(result is None):
            result = _run_task(harness_model, name, task, key=key, settings=settings)
        results[name] = _broadcast_result(world, result)
        yield results[name], is_new
    yield from group_results(loaded.groups, results, stored=stored)


def _broadcast_result(world: World, result: TaskResult | None) -> TaskResult:
    """Return the result of rank 0 on all ranks."""
    if world.size > 1:
        [result] = parse_results([world.broadcast(result.to_json() if world.is_main and result else {})])
    assert result is not None
    return result


def result_key(task: TaskObject, *, weights: str, settings: TaskSettings) -> str:
    """Return the key of a result: a hash of everything that its numbers depend on."""
    shots = _shots(task, settings)
    # num_fewshot: the harness overwrites it when it runs the task
    config = {name: value for name, value in task.dump_config().items() if name != "num_fewshot"}
    config["metadata"] = {
        name: value
        for name, value in (config.get("metadata") or {}).items()
        if name != "config_source"  # the path of the task's file
    }
    parts = {
        "weights": weights,
        "harness": importlib.metadata.version("lm-eval"),
        "task": config,
        "documents": list(_documents(task.eval_docs, settings.limit)),
        "examples": list(_documents(task.fewshot_docs(), None)) if shots else [],
        "shots": shots,
        "chat": settings.chat,
        **({} if settings.bootstrap == DEFAULT_BOOTSTRAP else {"bootstrap": settings.bootstrap}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _shots(task: TaskObject, settings: TaskSettings) -> int:
    default = task.get_config("num_fewshot")
    # as in the harness: 0 in a task's YAML means that examples make no sense for it
    return int(default or 0) if settings.shots is None or default == 0 else settings.shots


def _documents(
    documents: Any, limit: int | None
) -> Iterator[Any]:  # Any: a dataset, or a list of JSON values
    for index, document in enumerate(documents or ()):
        if limit is not None and index >= limit:
            return
        yield document


def item_texts(task: TaskObject, limit: int | None) -> list[str]:
    """Return the prompt of each item with its right answer, without examples."""
    return [_item_text(task, document) for document in _documents(task.eval_docs, limit)]


def _item_text(task: TaskObject, document: Any) -> str:  # Any: JSON values
    prompt, target = task.doc_to_text(document), task.doc_to_target(document)
    if isinstance(target, int) and task.get_config("doc_to_choice") is not None:
        target = task.doc_to_choice(document)[target]
    return f"{prompt} {target}" if isinstance(prompt, str) else str(target)


def load_tasks(names: Sequence[str]) -> LoadedTasks:
    """Return tasks and groups by name, with the tasks of the groups.

    A group in a file may name the tasks of other files in its directory.

    Args:
        names: names of tasks that the harness has, and paths of YAML files.

    Raises:
        ConfigError: the extra is not installed, a task is unknown, or a task cannot be loaded.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("benchmark tasks need lm-evaluation-harness", hint=EXTRA_HINT) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it reports each default of a YAML as a warning
    if not names:
        raise ConfigError(
            "no tasks were named", hint="name tasks or YAML files: --tasks arc_easy,my_task.yaml"
        )
    texts = {name: _read_task_file(name) for name in names if _is_file_name(name)}
    # indexing the tasks of the harness takes seconds, and a task file does not need them
    group_names = {name: match[1] for name, text in texts.items() if (match := _GROUP.search(text))}
    needs_index = bool(group_names) or len(texts) < len(names)
    tasks: dict[str, TaskObject] = {}
    groups: dict[str, GroupObject] = {}
    with _index_of_siblings(group_names) as index:
        manager = TaskManager(include_defaults=needs_index, include_path=index)
        for name in names:
            if name not in texts:
                _check_known(name, manager.all_tasks)
            try:
                with _preserved_random_state():
                    loaded = manager.load([group_names.get(name, name)])
            except Exception as error:  # the harness, a dataset or a task's own code may raise anything
                raise ConfigError(
                    f"the task {name} cannot be loaded: {error_text(error)}",
                    hint="see docs/evaluate.md for the keys of a task"
                    if name in texts
                    else "its data is downloaded on first use, which needs a network",
                ) from error
            tasks |= loaded["tasks"]
            groups |= loaded["groups"]
    return LoadedTasks(tasks, groups)


@contextlib.contextmanager
def _index_of_siblings(group_files: Collection[str]) -> Iterator[str | None]:
    """Yield a directory of files that include the task files next to group files, or None without groups.

    The harness would search directories recursively, which takes minutes in a large project.
    """
    if not group_files:
        yield None
        return
    directories = {Path(name).absolute().parent for name in group_files}
    siblings = sorted(path for directory in directories for path in directory.glob("*.yaml"))
    with tempfile.TemporaryDirectory(prefix="whet-tasks-") as index:
        for number, path in enumerate(siblings):
            (Path(index) / f"{number}.yaml").write_text(json.dumps({"include": str(path)}))
        yield index


def _is_file_name(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _read_task_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the task file {name} cannot be read: {error_text(error)}") from error


def _check_known(name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=_MAX_SUGGESTIONS)
    hint = f"did you mean {', '.join(close)}?" if close else "list the tasks with: lm_eval ls tasks"
    raise ConfigError(f"unknown task {name!r}", hint=f"{hint} A task file must end in .yaml")


def _run_task(
    model: Any, name: str, task: TaskObject, *, key: str, settings: TaskSettings
) -> TaskResult | None:  # Any: a model of the harness
    """Return the result of a task on rank 0, and None on the other ranks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        with _preserved_state(settings.bootstrap):
            results = simple_evaluate(
                model=model,
                tasks=[task],
                num_fewshot=settings.shots,
                limit=settings.limit,
                apply_chat_template=settings.chat,
                log_samples=True,
                bootstrap_iters=settings.bootstrap if model.world.is_main else 0,
                task_manager=TaskManager(include_defaults=False),  # the task is already loaded
            )
    except (WhetError, EvaluationStoppedError):
        raise
    except Exception as error:  # templates and functions of a task may raise anything
        raise ConfigError(f"the task {name} failed: {error_text(error)}") from error
    if not model.world.is_main:
        return None
    samples = results["samples"][name]
    ids, item_scores = _item_scores(samples)
    return TaskResult(
        key=key,
        task=name,
        version=str(results["versions"].get(name)),
        shots=int(results["n-shot"].get(name, 0)),
        items=len(ids),
        limit=settings.limit,
        chat=settings.chat,
        scores=_scores(results["results"][name], results["higher_is_better"].get(name, {})),
        item_ids=ids,
        item_scores=item_scores,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def _preserved_state(bootstrap: int) -> Iterator[None]:
    """Restore what the harness changes, and keep its progress bars out of stdout and of the logs of a run.

    Few resamples are computed in this process: a run must not fork.
    """
    in_run = bootstrap < DEFAULT_BOOTSTRAP
    variable = "DISABLE_MULTIPROC"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_preserved_random_state())
        stack.enter_context(_without_environment_report())
        if in_run and not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if in_run and variable not in os.environ:
            os.environ[variable] = "1"
            stack.callback(os.environ.pop, variable)
        yield


@contextlib.contextmanager
def _without_environment_report() -> Iterator[None]:
    """Leave out the harness's facts on git and the machine, which start programs and print errors."""
    from lm_eval import evaluator

    names = [name for name in ("get_git_commit_hash", "add_env_info") if hasattr(evaluator, name)]
    originals = {name: getattr(evaluator, name) for name in names}
    try:
        for name in names:
            setattr(evaluator, name, lambda *_: None)
        yield
    finally:
        for name, function in originals.items():
            setattr(evaluator, name, function)


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the global random states, which the harness uses and seeds: a caller may train a model."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _scores(metrics: Mapping[str, Any], higher_is_better: Mapping[str, bool | None]) -> dict[str, Score]:
    """Return the scores in the harness's table of a task, whose keys are METRIC,FILTER."""
    scores = {}
    for key, value in metrics.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = metrics.get(f"{metric}_stderr,{filter_name}")
        scores[_metric_name(metric, filter_name)] = Score(
            float(value),
            float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
            higher_is_better.get(metric) is not False,
        )
    return scores


def _metric_name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _item_scores(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[list[str], dict[str, list[float]]]:  # Any: JSON values
    """Return the ids of the items, and the scores per item of metrics that have a number for every item."""
    by_filter: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_filter.setdefault(sample["filter"], []).append(sample)
    ids: list[str] = []
    scores: dict[str, list[float]] = {}
    for filter_name, rows in by_filter.items():
        rows.sort(key=lambda sample: sample["doc_id"])
        ids = ids or _unique_ids(row["doc_hash"][:16] for row in rows)
        for metric in rows[0]["metrics"]:
            values = [_item_value(metric, row[metric]) for row in rows]
            numbers = [value for value in values if value is not None]
            if len(numbers) == len(values):
                scores[_metric_name(metric, filter_name)] = numbers
    return ids, scores


def _unique_ids(hashes: Iterator[str]) -> list[str]:
    """Return the hashes, with a number appended to those of repeated items."""
    counts: dict[str, int] = {}
    ids = []
    for each in hashes:
        counts[each] = counts.get(each, 0) + 1
        ids.append(each if counts[each] == 1 else f"{each}-{counts[each]}")
    return ids


def _item_value(metric: str, value: Any) -> float | None:  # Any: whatever a metric returns per item
    if metric == "bits_per_byte" and isinstance(value, tuple | list):
        logprob, size = value
        return -float(logprob) / (float(size) * math.log(2)) if size else None
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None
