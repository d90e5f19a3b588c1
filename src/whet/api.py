"""The functions of `import whet` that stand for whole commands: train, resume, evaluate and export."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from whet.config.load_config import ConfigLike
    from whet.data.sources.source import Spec
    from whet.data.tokens.chat_template import Supervise
    from whet.data.tokens.examples import TooLong
    from whet.given.given import Function
    from whet.model_io.export.export_run import Layout
    from whet.models.language_model import LanguageModel
    from whet.recipes.classify.classifier import Classifier
    from whet.training.callbacks import Callback
    from whet.training.state import RunResult

    Evaluated = str | Path | LanguageModel | Classifier | tuple[LanguageModel, Any]  # Any: a tokenizer

log = logging.getLogger("whet")
progress_log = logging.getLogger("whet.progress")  # of its own: log.txt leaves its lines out


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
    """Run a config from its first step to `final/`.

    Args:
        config: a mapping, the path of a YAML file, or a `RunConfig`.
        callbacks: called during the run, after whet's own.
        data: records by split (`{"train": rows, "valid": rows}`), or training records alone. Rows are a list
            of dicts, a `datasets.Dataset`, a pandas DataFrame, or a function that yields dicts.
        rewards: functions `f(prompt, completion, record) -> float` by name, for objective.kind grpo.
        metrics: functions `f(answers, records) -> float` by name, computed at every evaluation.
        objective: an `Objective`, or a class of objectives or recipes, instead of objective.kind.
        verbose: 1 shows a progress bar in a terminal and log lines elsewhere, on standard error; where
            Python's logging has handlers already, lines go to those instead. 0 shows nothing.

    Returns:
        The run's directory, its metrics, and why it stopped.

    Raises:
        WhetError: the config, the data or the model is wrong, or the run failed.
    """
    from whet.given.given import collect_given
    from whet.runs import run

    given = collect_given(data, rewards, metrics, objective)
    with _shown(verbose) as progress:
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
    """Resume a run from its newest valid checkpoint.

    Args:
        directory: the directory of the run.
        callbacks: as in `train`.
        data: the same records that `train` was given; others are refused, and so below.
        rewards: the same rewards.
        metrics: the same metrics.
        objective: the same objective.
        verbose: as in `train`.

    Returns:
        As `train` does; `history` has the rows since the checkpoint.

    Raises:
        WhetError: there is no such run, it has finished, or its data or model has changed.
    """
    from whet.given.given import collect_given
    from whet.runs import run

    given = collect_given(data, rewards, metrics, objective)
    with _shown(verbose) as progress:
        return run.resume(directory, [*progress, *callbacks], given)


def evaluate(
    model: "Evaluated",
    data: "Spec | Path",
    *,
    tokenizer: Any = None,  # Any: a transformers tokenizer
    generate: bool = False,
    samples: int = 0,
    max_tokens: int = 256,
    max_length: int = 2048,
    too_long: "TooLong" = "truncate",
    supervise: "Supervise" = "assistant",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # Any: numbers; the report of a classifier has lists, too
    """Evaluate a language model, a classifier or a quality model on records.

    Args:
        model: a finished run, a model's name or directory, a loaded model, the pair that `whet.load` returns,
            or a `Classifier`.
        data: a source as in data.test: a file, a directory (its test split), hf:NAME or synth:NAME:N.
        tokenizer: the tokenizer of a loaded model.
        generate: also generate an answer to each question and report exact matches.
        samples: with `generate`, log this many questions with their answers, at INFO.
        max_tokens: the longest generated answer.
        max_length: the longest example, in tokens.
        too_long: what happens to longer ones, as in data.too_long.
        supervise: the tokens whose loss counts, as in data.supervise.
        progress: called with the number of answers generated so far and of all.

    Returns:
        The metrics of `whet eval`: eval_loss, eval_perplexity and others of a language model; of a
        classifier its report. The keyword arguments are for language models only.

    Raises:
        WhetError: the model or the data is wrong.
    """
    from whet.data.sources.source import open_source
    from whet.errors import ConfigError, DataError, check_positive
    from whet.evaluation.evaluate_model import ModelEvaluation
    from whet.model_io.load import load
    from whet.recipes.classify.classifier import Classifier

    check_positive(max_tokens=max_tokens)
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, not {max_length}")
    spec = str(data) if isinstance(data, Path) else data
    if isinstance(model, Classifier):
        return model.evaluate(spec)
    if isinstance(model, str | Path) and (report := _evaluate_other(model, spec)) is not None:
        return report
    source = open_source(spec, split="test")  # wrong data is reported before a model is loaded
    if isinstance(model, str | Path):
        language_model, own = load(model)
    else:
        language_model, own = model if isinstance(model, tuple) else (model, None)
    if tokenizer is None and own is None:
        name = model if isinstance(model, str | Path) else "the model"
        raise DataError(f"{name} has no tokenizer, so it cannot read {spec}", hint="give one: tokenizer=...")
    evaluation = ModelEvaluation(
        language_model,
        own if tokenizer is None else tokenizer,
        source,
        max_length=min(max_length, language_model.max_positions),
        supervise=supervise,
        too_long=too_long,
    )
    log.info("%s: %s", spec, evaluation.summary)
    metrics = evaluation.loss()
    if generate and evaluation.questions:
        for question, answer in evaluation.answers(samples, max_tokens=max_tokens):
            log.info(
                "  asked     %s\n  expected  %s\n  answered  %s\n", question.text, question.answer, answer
            )
        total = len(evaluation.questions)
        advance = progress or (lambda *_: None)
        advance(0, total)
        metrics |= evaluation.exact_match(max_tokens=max_tokens, progress=lambda done: advance(done, total))
    return metrics


def export(
    run: str | Path,
    to: "Layout" = "hf",
    output: str | Path | None = None,
    *,
    check: bool = False,
    gguf_type: str | None = None,
    dtype: "str | torch.dtype | None" = None,
    tolerance: float | None = None,
) -> Path:
    """Write a run, an adapter directory or a model for another program.

    Args:
        run: what to export.
        to: "hf" (a model directory, adapters merged), "peft" or "mlx" (an adapter), "gguf" (one file).
        output: what to write; a run's exports go to its `export/` by default.
        check: open the result with its library and compare it with the model.
        gguf_type: how a GGUF file stores its matrices: f32, f16, bf16, q8_0 or q4_0.
        dtype: with "hf", round the weights to this; the base's own by default.
        tolerance: refuse a merge that changes a logit by more than this.

    Returns:
        The path that was written. Nothing is overwritten.

    Raises:
        WhetError: the run cannot be exported like that, or (with `check`) the result differs from it.
    """
    from whet.errors import RunError
    from whet.model_io.export.export_run import export_run

    exported = export_run(run, to, output, gguf_type=gguf_type, dtype=dtype, tolerance=tolerance)
    for line in (*exported.remarks, *exported.advice):
        log.info("%s", line)
    for result in exported.check() if check else []:
        if result.failed:
            raise RunError(f"{exported.path}: {result}")
        log.info("%s", result)
    return exported.path


def _evaluate_other(model: str | Path, data: "Spec") -> dict[str, Any] | None:  # Any: as in `evaluate`
    """Evaluate a quality model or a classifier; None for a language model."""
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.model_io.resolve import usable_directory
    from whet.run_directory import ARCH_FILE

    directory = Path(usable_directory(model)).expanduser()
    if (directory / ARCH_FILE).is_file() and not (directory / "config.json").is_file():
        from whet.recipes.quality.quality import evaluate_quality

        return evaluate_quality(directory, data)
    if is_classifier(directory):
        from whet.recipes.classify.classifier import Classifier

        return Classifier.load(model).evaluate(data)
    return None


@contextlib.contextmanager
def _shown(verbose: int) -> "Iterator[list[Callback]]":
    """Log what happens inside, and give the callbacks that show a run's progress."""
    from whet.parallel.process_group import started_as_one_of_many

    if not verbose or (started_as_one_of_many() and os.environ["RANK"] != "0"):
        yield []
        return
    terminal = sys.stderr is not None and sys.stderr.isatty()
    with contextlib.ExitStack() as held:
        if not log.hasHandlers():  # else whoever configured logging sees the lines there
            _add_handler(held, terminal=terminal)
        if terminal:
            from whet.reporting.console import notes
            from whet.reporting.progress import RunProgress

            bar = RunProgress(notes())
            held.callback(bar.close)
            yield [bar]
        elif log.isEnabledFor(logging.INFO):
            from whet.reporting.progress import ProgressLines

            yield [ProgressLines(progress_log.info)]
        else:
            yield []


def _add_handler(held: contextlib.ExitStack, *, terminal: bool) -> None:
    """Show whet's log lines on standard error until `held` closes, at INFO unless the logger has a level."""
    handler: logging.Handler
    if terminal:
        from whet.reporting.console import NotesHandler

        handler = NotesHandler()  # above the progress bar
    else:
        from whet.runs.run_log import LineFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter())
    log.addHandler(handler)
    held.callback(log.removeHandler, handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
        held.callback(log.setLevel, logging.NOTSET)
