"""Evaluate and compare models from Python: on records, on code, on benchmark tasks."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.config.data import Format
    from whet.data.sources.source import SourceSpec
    from whet.data.tokens.examples import TooLong
    from whet.data.tokens.loss_mask import Supervise
    from whet.evaluation.task_result import TaskResult
    from whet.models.language_model import LanguageModel
    from whet.recipes.classify.classifier import Classifier
    from whet.studies.compare_models import ModelComparison

    Evaluated = str | Path | LanguageModel | Classifier | tuple[LanguageModel, Any]  # Any: a tokenizer

log = logging.getLogger("whet")


def evaluate(
    model: "Evaluated",
    data: "SourceSpec | Path | Sequence[Mapping[str, Any]]",  # Any: the keys of a weighted source
    *,
    tokenizer: Any = None,  # Any: a transformers tokenizer
    generate: bool = False,
    checks: Iterable[str] = (),
    samples: int = 0,
    max_tokens: int = 256,
    max_length: int = 2048,
    too_long: "TooLong" = "truncate",
    supervise: "Supervise | None" = None,
    columns: Mapping[str, str] | None = None,
    record_format: "Format | None" = None,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,  # Any: JSON values
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # Any: numbers, lists in the report of a classifier, and the metrics of sources
    """Evaluate a language model, a classifier or a quality model on a data set.

    The keyword arguments only apply to language models. If the model is a run, the defaults of `supervise`,
    `columns` and `template_args` are those of its config.

    Args:
        model: A finished run, a model name or directory, a loaded model, the (model, tokenizer) pair that
            `whet.load` returns, or a `Classifier`.
        data: A source as in data.test: a file, a directory (its test split), hf:NAME or synth:NAME:N; or a
            list of sources, optionally with weights.
        tokenizer: The tokenizer of a loaded model that is passed without one.
        generate: Also generate a response to each prompt and report exact match.
        checks: With `generate`, checks of the responses, reported as the fraction that passes: "json_valid",
            "json_schema=FILE", "regex=PATTERN" or "numeric_match".
        samples: With `generate`, the number of prompts to log with their responses, at level INFO.
        max_tokens: The maximum number of tokens per generated response.
        max_length: The maximum length of an example, in tokens.
        too_long: How to treat longer examples, as in data.too_long.
        supervise: The tokens that count for the loss, as in data.supervise. By default "assistant".
        columns: Names of columns in the data, by whet's name of the field, as in data.columns.
        record_format: The format of the records, as in data.format. By default detected.
        template: A chat template, as in data.template. By default that of the model.
        template_args: Arguments of the chat template, as in data.template_args.
        progress: Called as `progress(done, total)` with the number of generated responses.

    Returns:
        The metrics that `whet eval` prints: for a language model eval_loss, eval_perplexity and others (with
        `generate` also exact_match), for a classifier its report, for a quality model its metrics. With
        several sources, `sources` has the metrics of each by name.

    Raises:
        WhetError: The model or the data is invalid.
    """
    from whet.errors import ConfigError, check_positive
    from whet.evaluation.data_options import options_of_model
    from whet.evaluation.evaluate_sources import GenerationSettings, evaluate_sources, sources_of
    from whet.recipes.classify.classifier import Classifier
    from whet.rl.rewards.answer_checks import parse_checks

    check_positive(max_tokens=max_tokens)
    parsed_checks = parse_checks(list(checks))
    if parsed_checks and not generate:
        raise ConfigError(
            "checks need generated responses", hint="set generate=True, or leave out the checks"
        )
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, not {max_length}")
    spec = _source_spec(data)
    given = {
        "supervise": supervise,
        "columns": columns,
        "form": record_format,
        "template": template,
        "template_args": template_args,
    }
    if isinstance(model, Classifier):
        return model.evaluate(spec)
    if isinstance(model, str | Path) and (report := _evaluate_other_model(model, spec)) is not None:
        if any(value is not None for value in given.values()):
            raise ConfigError(f"{model} is not a language model, so options of the data do not apply to it")
        return report
    options = options_of_model(model).replace_given(**given)
    for each in sources_of(spec):
        options.open(each)  # report invalid data before loading the model
    language_model, model_tokenizer = _load_with_tokenizer(model, tokenizer, spec)
    generation = GenerationSettings(max_tokens, parsed_checks, samples, progress or (lambda *_: None))
    return evaluate_sources(
        language_model,
        options.apply_template(model_tokenizer),
        spec,
        options=options,
        max_length=min(max_length, language_model.max_positions),
        too_long=too_long,
        generation=generation if generate else None,
    )


def evaluate_code(
    model: "str | Path | tuple[LanguageModel, Any]",  # Any: a tokenizer
    data: "SourceSpec | Path",
    *,
    n: int = 1,
    k: Iterable[int] | None = None,
    temperature: float = 0.0,
    max_tokens: int = 512,
    seed: int = 0,
    timeout: float = 10.0,
    samples: int = 0,
    columns: Mapping[str, str] | None = None,
    record_format: "Format | None" = None,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,  # Any: JSON values
    allow_code_execution: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:  # Any: numbers, and a count of each failure
    """Generate Python programs, run them with the tests of their records, and return pass@k.

    A record has a prompt and `tests`: Python code or a list of assert statements. The fields of HumanEval
    (`test`, `entry_point`) and MBPP (`test_list`) are read as well. The programs run in a sandbox, whose
    protection has limits: docs/evaluate.md lists them.

    Args:
        model: A finished run, a model name or directory, or the (model, tokenizer) pair of `whet.load`.
        data: The records, as in `evaluate`.
        n: The number of programs per prompt.
        k: The values of k. By default 1 and n.
        temperature: The sampling temperature. 0 is greedy, for n = 1.
        max_tokens: The maximum number of tokens per answer.
        seed: Determines the samples.
        timeout: The limit on the running time of a program, in seconds.
        samples: The number of prompts to log with a program and its result, at level INFO.
        columns: Names of columns in the data, as in `evaluate`.
        record_format: The format of the records, as in `evaluate`.
        template: A chat template, as in `evaluate`.
        template_args: Arguments of the chat template, as in `evaluate`.
        allow_code_execution: Must be True: the model's code runs on this machine.
        progress: Called with what is done, the number of programs, and their total.

    Returns:
        `pass@K` for each k with `pass@K_stderr`, the number of `problems`, the number of `samples` per
        problem, and `failures`: how often programs failed, by reason.

    Raises:
        WhetError: The model or the data is invalid, or code execution was not allowed.
    """
    from whet.data.tokens.prompts import read_prompts
    from whet.errors import ConfigError
    from whet.evaluation.code_tests import CodeSettings
    from whet.evaluation.code_tests import evaluate_code as evaluate_programs
    from whet.evaluation.data_options import options_of_model
    from whet.evaluation.sandbox.sandbox import SandboxLimits

    if not allow_code_execution:
        raise ConfigError(
            "python_tests runs code that the model writes on this machine",
            hint="allow it with --allow-code-execution, or allow_code_execution=True in Python; "
            "docs/evaluate.md says what the sandbox protects",
        )
    if not timeout > 0:
        raise ConfigError(f"timeout must be positive, not {timeout:g}")
    limits = SandboxLimits(wall_s=timeout, cpu_s=math.ceil(timeout))
    settings = CodeSettings(
        n, None if k is None else tuple(k), temperature, max_tokens=max_tokens, seed=seed, limits=limits
    )
    spec = _source_spec(data)
    options = options_of_model(model).replace_given(
        columns=columns, form=record_format, template=template, template_args=template_args
    )
    source = options.open(spec)  # report invalid data before loading the model
    language_model, model_tokenizer = _load_with_tokenizer(model, None, spec)
    model_tokenizer = options.apply_template(model_tokenizer)
    prompts = read_prompts(source, model_tokenizer, template_args=options.template_args)
    return evaluate_programs(
        language_model, model_tokenizer, prompts, settings, samples=samples, progress=progress
    )


def benchmark(
    model: "str | Path | tuple[LanguageModel, Any]",  # Any: a tokenizer
    tasks: Iterable[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    contamination: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> "list[TaskResult]":
    """Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness (needs `whet[evals]`).

    The results of a run are stored in its directory. A task is not computed again if the weights, the task,
    its items and the settings are those of a stored result.

    Args:
        model: A finished run, a model name or directory, or the (model, tokenizer) pair of `whet.load`.
        tasks: Names of tasks, or paths of task files (YAML).
        limit: The number of items per task. By default all.
        shots: The number of examples in each prompt. By default that of the task.
        chat: Render prompts with the model's chat template.
        contamination: Count the items that overlap with the run's training data, data.train.
        progress: Called with what is computed, the number of finished requests of a task, and their total.

    Returns:
        The result of each task: its scores with standard errors, and the score of each item. The totals of
        groups follow the tasks.

    Raises:
        WhetError: A task or the model is invalid, or lm-evaluation-harness is not installed.
    """
    from whet.errors import ConfigError
    from whet.evaluation.benchmarks import TaskSettings, load_tasks, run_tasks
    from whet.evaluation.task_result import append_result, read_results
    from whet.model_io.load import load
    from whet.runs.model_card import refresh_final_card

    settings = TaskSettings(limit, shots, chat)
    directory = _run_of(model)
    if contamination and directory is None:
        raise ConfigError(
            f"{model} is not a run, so its training data is unknown", hint="leave out contamination"
        )
    loaded_tasks = load_tasks(list(tasks))  # report invalid tasks before loading the model
    language_model, tokenizer = model if isinstance(model, tuple) else load(model)
    stored = read_results(directory) if directory else []
    results = []
    for result, is_new in run_tasks(
        language_model, tokenizer, loaded_tasks, settings=settings, stored=stored, progress=progress
    ):
        final = result
        is_task = result.task in loaded_tasks.tasks
        if contamination and is_task and directory is not None and result.contamination is None:
            final = _with_contamination(result, loaded_tasks.tasks[result.task], directory)
        if directory is not None and (is_new or final != result):
            append_result(directory, final)
        if not is_new:
            log.info("%s: stored result of %s", result.task, result.date)
        results.append(final)
    if directory is not None:
        refresh_final_card(directory)
    return results


def compare_models(
    models: Sequence[str | Path],
    data: "SourceSpec | Path | None" = None,
    *,
    tasks: Iterable[str] = (),
    generate: bool = True,
    checks: Iterable[str] = (),
    samples: int = 3,
    max_tokens: int = 256,
    max_length: int = 2048,
    too_long: "TooLong" = "truncate",
    supervise: "Supervise" = "assistant",
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> "ModelComparison":
    """Evaluate several models on the same records or tasks, and compare them with the first one.

    Differences are paired by record or item. The results of runs are stored in their directories, and are not
    computed again.

    Args:
        models: Names or directories of models, GGUF files, exports or runs. The first one is the baseline.
        data: Records, as in `evaluate`. Give either records or tasks.
        tasks: Benchmark tasks, as in `benchmark`.
        generate: With records, also generate responses, for exact match, checks and samples.
        checks: With records, checks of the responses, as in `evaluate`.
        samples: With records, the number of prompts to return with the response of each model.
        max_tokens: With records, the maximum number of tokens per generated response.
        max_length: With records, the maximum length of an example, in tokens.
        too_long: With records, how to treat longer examples, as in data.too_long.
        supervise: With records, the tokens that count for the loss, as in data.supervise.
        limit: With tasks, the number of items per task.
        shots: With tasks, the number of examples in each prompt.
        chat: With tasks, render prompts with the chat template.
        progress: Called with what is computed, the finished number of requests, and their total.

    Returns:
        For each metric the values of the models with standard errors, the difference of each to the first
        with a 95% interval and p-values, and the samples.

    Raises:
        WhetError: A model, the data or a task is invalid.
    """
    from whet.errors import ConfigError, check_positive
    from whet.rl.rewards.answer_checks import parse_checks
    from whet.studies.compare_models import RecordSettings, check_models, compare_on_records, compare_results

    names, task_names = check_models(models), list(tasks)
    if (data is None) == (not task_names):
        raise ConfigError("give either data or tasks to compare the models on")
    if data is None:
        settings = {"limit": limit, "shots": shots, "chat": chat, "progress": progress}
        results = [benchmark(model, task_names, **settings) for model in models]  # type: ignore[arg-type]  # mixed
        return compare_results(names, results)
    check_positive(max_tokens=max_tokens)
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, not {max_length}")
    parsed = parse_checks(list(checks))
    if parsed and not generate:
        raise ConfigError(
            "checks need generated responses", hint="set generate=True, or leave out the checks"
        )
    record_settings = RecordSettings(
        generate, parsed, samples, max_tokens, max_length, too_long=too_long, supervise=supervise
    )
    spec = str(data) if isinstance(data, Path) else data
    return compare_on_records(models, spec, record_settings, progress=progress)


def _source_spec(
    data: "SourceSpec | Path | Sequence[Mapping[str, Any]]",
) -> "SourceSpec":  # Any: as in `evaluate`
    """Return the source of `whet.evaluate`, with mappings as weighted sources."""
    from whet.config.data import WeightedSource

    if isinstance(data, str | Path):
        return str(data)
    parts = [WeightedSource(**part) if isinstance(part, Mapping) else part for part in data]
    sources = [str(part) if isinstance(part, Path) else part for part in parts]
    return sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources  # type: ignore[return-value]  # all str or all weighted


def _load_with_tokenizer(
    model: "str | Path | LanguageModel | tuple[LanguageModel, Any]",
    tokenizer: Any,
    spec: "SourceSpec",  # Any: a transformers tokenizer
) -> "tuple[LanguageModel, Any]":
    """Return the language model that an argument names or contains, and the tokenizer."""
    from whet.errors import DataError
    from whet.model_io.load import load

    if isinstance(model, str | Path):
        language_model, loaded_tokenizer = load(model)
    else:
        language_model, loaded_tokenizer = model if isinstance(model, tuple) else (model, None)
    if tokenizer is None and loaded_tokenizer is None:
        name = model if isinstance(model, str | Path) else "the model"
        raise DataError(f"{name} has no tokenizer, so it cannot read {spec}", hint="pass one: tokenizer=...")
    return language_model, loaded_tokenizer if tokenizer is None else tokenizer


def _evaluate_other_model(
    model: str | Path, data: "SourceSpec"
) -> dict[str, Any] | None:  # Any: as in `evaluate`
    """Evaluate a quality model or a classifier; return None for a language model."""
    from whet.model_io.base_models import local_model_directory
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.run_directory import ARCH_FILE

    directory = Path(local_model_directory(model)).expanduser()
    if (directory / ARCH_FILE).is_file() and not (directory / "config.json").is_file():
        from whet.recipes.quality.quality import evaluate_quality

        return evaluate_quality(directory, data)
    if is_classifier(directory):
        from whet.recipes.classify.classifier import Classifier

        return Classifier.load(model).evaluate(data)
    return None


def _with_contamination(
    result: "TaskResult", task: Any, directory: Path
) -> "TaskResult":  # Any: a task of the harness
    from dataclasses import replace

    from whet.config.load_config import load_config
    from whet.data.clean.record_turns import record_texts
    from whet.data.sources.source import open_source
    from whet.evaluation.benchmarks import item_texts
    from whet.evaluation.contamination import contamination_of
    from whet.run_directory import CONFIG_FILE

    data = load_config(directory / CONFIG_FILE).data
    records = open_source(data.train, split="train", on_bad="skip")
    items = item_texts(task, result.limit)
    return replace(result, contamination=contamination_of(result, items, record_texts(records)))


def _run_of(model: object) -> Path | None:
    """Return the run directory that a model argument names, or None."""
    from whet.model_io.base_models import expand_user
    from whet.runs.run_files import is_run

    path = expand_user(model) if isinstance(model, str | Path) else None
    return path if path is not None and is_run(path) else None
