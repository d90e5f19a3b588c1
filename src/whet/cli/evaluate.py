"""whet eval: loss, perplexity and exact match on a dataset, and scores on benchmark tasks."""

import contextlib
import json
import re
import shlex
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

_PYTHON_TESTS = "python_tests"


class Supervised(Enum):
    """The values of --supervise, which are those of data.supervise."""

    assistant = "assistant"
    last = "last"
    all = "all"
    completion = "completion"


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    data: list[str] = typer.Option(  # noqa: B008
        [],
        "--data",
        help="Records: a file, a directory (its test split, or ledgers), hf:NAME or synth:NAME:N "
        "(repeatable: metrics per source and in total).",
    ),
    tasks: str | None = typer.Option(
        None, "--tasks", help="Benchmark tasks, separated by commas: names or YAML files (needs lm-eval)."
    ),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Number of items per task; default: all."),
    shots: int | None = typer.Option(
        None, "--shots", min=0, help="Number of examples in each prompt of a task; default: the task's."
    ),
    chat: bool = typer.Option(False, "--chat", help="Render the prompts of tasks with the chat template."),
    contamination: bool = typer.Option(
        False, "--contamination", help="Count the items of tasks that overlap with the run's training data."
    ),
    generate: bool = typer.Option(True, help="Also generate completions, for exact match."),
    checks: list[str] = typer.Option(  # noqa: B008
        [],
        "--check",
        help="Also report the fraction of completions that pass: json_valid, json_schema=FILE, regex=PATTERN "
        "or numeric_match (repeatable). python_tests: report pass@k of generated programs instead.",
    ),
    n: int | None = typer.Option(None, "--n", min=1, help="python_tests: programs per prompt; default: 1."),
    k: list[int] = typer.Option(  # noqa: B008
        [], "--k", min=1, help="python_tests: report pass@K (repeatable); default: 1 and N."
    ),
    temperature: float | None = typer.Option(
        None, "--temperature", min=0, help="python_tests: sampling temperature; default: 0, greedy."
    ),
    seed: int | None = typer.Option(None, "--seed", help="python_tests: seed of sampling; default: 0."),
    timeout: float | None = typer.Option(
        None, "--timeout", help="python_tests: seconds that a program may run; default: 10."
    ),
    allow_code_execution: bool = typer.Option(
        False, "--allow-code-execution", help="python_tests: allow running the model's code on this machine."
    ),
    samples: int = typer.Option(3, min=0, help="Number of prompts to show with their completions."),
    max_tokens: int = typer.Option(256, min=1, help="Maximum number of generated tokens."),
    max_length: int = typer.Option(2048, min=2, help="Maximum example length, in tokens."),
    split: bool = typer.Option(
        False, "--split", help="Split longer examples into windows instead of truncating them."
    ),
    supervise: Supervised | None = typer.Option(  # noqa: B008
        None,
        help="Tokens that count towards the loss: all, all assistant turns, the last one, or those after the "
        "last user message; default: that of the run, or assistant.",
    ),
    columns: str | None = typer.Option(
        None,
        "--columns",
        help="Names of columns, as in prompt=question,completion=answer; default: those of the run. none: no "
        "renaming.",
    ),
    record_format: str | None = typer.Option(
        None, "--format", help="Format of the records, as in data.format; default: detected."
    ),
    template: str | None = typer.Option(
        None, "--template", help="Chat template: a name or a .jinja file; default: that of the model."
    ),
    template_args: str | None = typer.Option(
        None,
        "--template-args",
        help="Arguments of the chat template: JSON, or NAME=VALUE,NAME=VALUE; default: those of the run.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the metrics as one JSON object."),
) -> None:
    """Compute loss and exact match, or benchmark scores.

    --data evaluates a model on records, --tasks on tasks of lm-evaluation-harness.
    """
    from whet.cli.console import set_up_logging
    from whet.errors import ConfigError

    if bool(data) == (tasks is not None):
        problem = "--data and --tasks exclude each other" if data else "either --data or --tasks is needed"
        raise ConfigError(problem, hint="--data evaluates on your records, --tasks on benchmark tasks")
    set_up_logging()
    if tasks is not None:
        _run_tasks(
            model, tasks, as_json=as_json, limit=limit, shots=shots, chat=chat, contamination=contamination
        )
        return
    if limit is not None or shots is not None or chat or contamination:
        raise ConfigError("--limit, --shots, --chat and --contamination apply to --tasks only")
    from whet.evaluation.data_options import parse_columns, parse_format, parse_template_args

    options = {
        "columns": None if columns is None else parse_columns(columns),
        "record_format": None if record_format is None else parse_format(record_format),
        "template": template,
        "template_args": None if template_args is None else parse_template_args(template_args),
        "samples": samples,
    }
    code_options = {
        "n": n,
        "k": k or None,
        "temperature": temperature,
        "seed": seed,
        "timeout": timeout,
        "allow_code_execution": allow_code_execution or None,
    }
    given = {name: value for name, value in code_options.items() if value is not None}
    if _PYTHON_TESTS in checks:
        if len(checks) > 1:
            raise ConfigError(f"--check {_PYTHON_TESTS} runs on its own", hint="leave out the other checks")
        _evaluate_code(model, data, as_json=as_json, max_tokens=max_tokens, **options, **given)
        return
    if given:
        name = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{name} needs --check {_PYTHON_TESTS}")
    _evaluate(
        model,
        data,
        as_json=as_json,
        generate=generate,
        checks=checks,
        max_tokens=max_tokens,
        max_length=max_length,
        too_long="split" if split else "truncate",
        supervise=None if supervise is None else supervise.value,
        **options,
    )


def _evaluate_code(
    model: str, data: list[str], *, as_json: bool, **settings: Any
) -> None:  # Any: as in whet.evaluate_code
    from whet.api.evaluate import evaluate_code
    from whet.reporting.console import stderr_console
    from whet.reporting.text.source_text import pass_at_k_text

    with stderr_console().status("evaluating") as status, _hints_with_options():
        metrics = evaluate_code(
            model,
            data,
            progress=lambda what, done, total: status.update(f"{what}: {done} of {total}"),
            **settings,
        )
    print(json.dumps(metrics) if as_json else pass_at_k_text(metrics))


def _evaluate(
    model: str, data: list[str], *, as_json: bool, **settings: Any
) -> None:  # Any: as in whet.evaluate
    from whet.api.evaluate import evaluate
    from whet.model_io.base_models import local_model_directory
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.reporting.console import stderr_console
    from whet.reporting.progress import format_metrics
    from whet.reporting.text.classifier_text import classification_text
    from whet.reporting.text.source_text import sources_text

    with stderr_console().status("evaluating") as status, _hints_with_options():
        metrics = evaluate(
            model,
            data,
            progress=lambda done, total: status.update(f"generating: {done} of {total} completions"),
            **settings,
        )
    if as_json:
        print(json.dumps(metrics))
    elif is_classifier(local_model_directory(model)):
        print(classification_text(metrics))
    elif "sources" in metrics:
        print(sources_text(metrics))
    else:
        print(format_metrics(metrics))


@contextlib.contextmanager
def _hints_with_options() -> "Iterator[None]":
    """Name the option of this command instead of the config key, in the hint for records of other columns."""
    from whet.errors import DataError

    try:
        yield
    except DataError as error:
        columns = re.fullmatch(r"set data\.columns: \{(.+)\}", error.hint or "")
        if columns is None:
            raise
        option = columns[1].replace(": ", "=").replace(", ", ",")
        raise DataError(error.message, hint=f"add --columns {shlex.quote(option)}") from error


def _run_tasks(
    model: str, tasks: str, *, as_json: bool, **settings: Any
) -> None:  # Any: as in whet.benchmark
    from whet.api.evaluate import benchmark
    from whet.reporting.console import stderr_console
    from whet.reporting.text.benchmark_text import results_text

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with stderr_console().status("loading tasks") as status:
        results = benchmark(
            model,
            names,
            progress=lambda what, done, total: status.update(f"{what}: {done} of {total}"),
            **settings,
        )
    if as_json:
        print(json.dumps([result.to_json() for result in results]))
    else:
        print(results_text(results))
