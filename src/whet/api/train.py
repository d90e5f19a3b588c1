"""Train and resume from Python."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.config.load_config import ConfigLike
    from whet.given.given import Function
    from whet.training.callbacks import Callback
    from whet.training.state import RunResult

log = logging.getLogger("whet")
progress_log = logging.getLogger("whet.progress")  # separate, because log.txt excludes it


def train(
    config: "ConfigLike",
    callbacks: "Iterable[Callback]" = (),
    *,
    data: object = None,
    rewards: "Mapping[str, Function] | None" = None,
    metrics: "Mapping[str, Function] | None" = None,
    objective: object | None = None,
    verbose: int = 1,
) -> "RunResult":
    """Train a model as described by a config, and write the result to `final/` in the run directory.

    Existing runs are never overwritten. An interrupted run can be continued with `whet.resume`.

    Args:
        config: A mapping of sections, the path of a YAML file, or a `RunConfig` (keys: docs/config.md).
        callbacks: Callbacks to run in addition to the built-in ones, after them.
        data: Records passed from Python instead of named in the config: a mapping of splits to rows
            (`{"train": rows, "valid": rows}`), or training rows alone. Rows are a list of dicts, a
            `datasets.Dataset`, a pandas DataFrame, or a function that yields dicts.
        rewards: Reward functions `f(prompt, completion, record) -> float` by name, for objective.kind: grpo.
        metrics: Metric functions `f(answers, records) -> float` by name, computed at every evaluation and
            logged as `eval_NAME`.
        objective: A custom `Objective`, or a subclass of `Objective` or `Recipe`, instead of objective.kind.
        verbose: 1 shows a progress bar if standard error is a terminal, and log lines otherwise. If Python's
            logging already has handlers, log lines go to those instead. 0 shows nothing.

    Returns:
        The run directory, the final metrics, the metrics history, and the reason why the run stopped.

    Raises:
        WhetError: The config, the data or the model is invalid, or the run failed.
    """
    from whet.given.given import collect_given
    from whet.runs import run

    given = collect_given(data, rewards, metrics, objective)
    with _progress_output(verbose) as progress:
        return run.train(config, [*progress, *callbacks], given)


def resume(
    directory: str | Path,
    callbacks: "Iterable[Callback]" = (),
    *,
    data: object = None,
    rewards: "Mapping[str, Function] | None" = None,
    metrics: "Mapping[str, Function] | None" = None,
    objective: object | None = None,
    verbose: int = 1,
) -> "RunResult":
    """Resume an interrupted run from its newest valid checkpoint.

    Objects that were passed to `whet.train` from Python must be passed again. Their hashes are compared, and
    a different object is an error.

    Args:
        directory: The run directory.
        callbacks: Callbacks to run in addition to the built-in ones, after them.
        data: The records that were passed to `train`, if any.
        rewards: The reward functions that were passed to `train`, if any.
        metrics: The metric functions that were passed to `train`, if any.
        objective: The objective that was passed to `train`, if any.
        verbose: Whether to show progress, as in `train`.

    Returns:
        The same result as `train`. Its `history` starts at the checkpoint.

    Raises:
        WhetError: The run does not exist, has already finished, or its data or model has changed.
    """
    from whet.given.given import collect_given
    from whet.runs import run

    given = collect_given(data, rewards, metrics, objective)
    with _progress_output(verbose) as progress:
        return run.resume(directory, [*progress, *callbacks], given)


@contextlib.contextmanager
def _progress_output(verbose: int) -> "Iterator[list[Callback]]":
    """Show log lines while the context is open, and yield the callbacks that show a run's progress."""
    from whet.parallel.process_group import is_distributed_launch

    if not verbose or (is_distributed_launch() and os.environ["RANK"] != "0"):
        yield []
        return
    terminal = sys.stderr is not None and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        if not log.hasHandlers():  # otherwise the user's handlers show the lines
            _add_handler(stack, terminal=terminal)
        if terminal:
            from whet.reporting.console import stderr_console
            from whet.reporting.progress import RunProgress

            bar = RunProgress(stderr_console())
            stack.callback(bar.close)
            yield [bar]
        elif log.isEnabledFor(logging.INFO):
            from whet.reporting.progress import ProgressLines

            yield [ProgressLines(progress_log.info)]
        else:
            yield []


def _add_handler(stack: contextlib.ExitStack, *, terminal: bool) -> None:
    """Log to standard error until `stack` closes, at level INFO unless the logger has a level."""
    handler: logging.Handler
    if terminal:
        from whet.reporting.console import ConsoleHandler

        handler = ConsoleHandler()  # above the progress bar
    else:
        from whet.runs.run_log import LineFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter())
    log.addHandler(handler)
    stack.callback(log.removeHandler, handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
        stack.callback(log.setLevel, logging.NOTSET)
