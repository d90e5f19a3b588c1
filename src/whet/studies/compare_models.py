"""Compare models on the same records or tasks: differences to the first model, and samples side by side."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet.data.sources.source import Source, SourceSpec, open_source
from whet.data.tokens.examples import TooLong
from whet.data.tokens.loss_mask import Supervise
from whet.errors import ConfigError, DataError
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.record_scores import answer_result, evaluation_key, loss_results, record_losses
from whet.evaluation.task_result import TaskResult, append_result, read_results
from whet.model_io.base_models import expand_user, local_model_directory
from whet.model_io.fingerprints import weights_digest
from whet.model_io.load import check_not_classifier, load
from whet.model_io.resolve_model import resolve_model
from whet.rl.rewards.answer_checks import AnswerCheck
from whet.runs.model_card import refresh_final_card
from whet.runs.run_files import is_run
from whet.studies.compare_benchmarks import BenchmarkComparison, benchmarks_json, compare_task_results

Progress = Callable[[str, int, int], None]

DIFFERENT_TOKENS = (
    "the models have different tokenizers, so their losses and perplexities per token are not compared: "
    "bits_per_byte is"
)


@dataclass(frozen=True)
class AnswerSample:
    """A prompt, the expected answer, and the answer of each model."""

    prompt: str
    expected: str
    answers: list[str]


@dataclass(frozen=True)
class ModelComparison:
    """Models on the same records or tasks; differences are to the first model."""

    names: list[str]
    metrics: list[BenchmarkComparison]  # `values`, `stderrs` and `paired` have one entry per model
    samples: list[AnswerSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the comparison as JSON values."""
        return {
            "models": self.names,
            "interval": "95%, paired bootstrap over the items",
            "test": "exact McNemar for scores of 0 and 1, else a paired t-test; p_adjusted by Holm",
            "metrics": benchmarks_json(self.metrics),
            "samples": [asdict(sample) for sample in self.samples],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class RecordSettings:
    """How models are evaluated on records.

    Args:
        generate: whether models also answer the prompts.
        checks: checks of the answers.
        samples: the number of prompts to show with the answers.
        max_tokens: the largest number of tokens per answer.
        max_length: the largest number of tokens per example.
        too_long: how longer examples are treated.
        supervise: the tokens that count for the loss.
    """

    generate: bool = True
    checks: Sequence[AnswerCheck] = ()
    samples: int = 3
    max_tokens: int = 256
    max_length: int = 2048
    too_long: TooLong = "truncate"
    supervise: Supervise = "assistant"


def check_models(models: Sequence[str | Path]) -> list[str]:
    """Return a short, distinct name of each model.

    Raises:
        ConfigError: There are fewer than two models, or one is given twice.
        ModelError: One does not exist. It is reported before the others are evaluated.
    """
    if len(models) < 2:
        raise ConfigError("a comparison needs at least two models")
    full = [str(model) for model in models]
    if repeated := [name for name in full if full.count(name) > 1]:
        raise ConfigError(f"{repeated[0]} is given twice")
    for model in models:
        check_not_classifier(model)
        directory = local_model_directory(model)
        if not isinstance(directory, Path):
            resolve_model(directory)
    short = [Path(name.rstrip("/")).name or name for name in full]
    return short if len(set(short)) == len(short) else full


def compare_results(
    names: Sequence[str], results: Sequence[Sequence[TaskResult]], samples: Sequence[AnswerSample] = ()
) -> ModelComparison:
    """Compare the results of models, one sequence per model."""
    comparisons = compare_task_results([[each] for each in results])
    compared = {comparison.metric for comparison in comparisons}
    computed = {name for each in results for result in each for name in result.scores}
    notes = [DIFFERENT_TOKENS] if "loss" in computed - compared else []
    return ModelComparison(list(names), comparisons, list(samples), notes)


def compare_on_records(
    models: Sequence[str | Path],
    data: SourceSpec,
    settings: RecordSettings,
    *,
    progress: Progress = lambda *_: None,
) -> ModelComparison:
    """Evaluate models one after the other on the same records, and compare them.

    The results of a run are stored in its directory, and are not computed again.

    Args:
        models: Names of models, directories, GGUF files or runs. The first one is the baseline.
        data: The records.
        settings: How the models are evaluated.
        progress: Called with what is computed, the number of answered prompts, and their total.

    Raises:
        WhetError: A model or the data is invalid.
    """
    names = check_models(models)
    source = open_source(data, split="test")  # report invalid data before loading models
    evaluated = [
        _evaluate(model, name, source, settings, progress) for model, name in zip(models, names, strict=True)
    ]
    prompts = [[(sample.prompt, sample.expected) for sample in samples] for _, samples in evaluated]
    combined = [
        AnswerSample(prompt, expected, [samples[index].answers[0] for _, samples in evaluated])
        for index, (prompt, expected) in enumerate(prompts[0])
    ]
    return compare_results(names, [results for results, _ in evaluated], combined)


def _evaluate(
    model: str | Path, name: str, source: Source, settings: RecordSettings, progress: Progress
) -> tuple[list[TaskResult], list[AnswerSample]]:
    """Return the results of one model, and its answers to the first prompts."""
    language_model, tokenizer = load(model)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer, so it cannot read {source.name}")
    evaluation = ModelEvaluation(
        language_model,
        tokenizer,
        source,
        max_length=min(settings.max_length, language_model.max_positions),
        supervise=settings.supervise,
        too_long=settings.too_long,
    )
    key = evaluation_key(weights_digest(language_model), evaluation, _answer_settings(evaluation, settings))
    directory = path if is_run(path := expand_user(model)) else None
    results = _stored_results(directory, key, settings.generate and bool(evaluation.questions))
    shown = evaluation.questions[: settings.samples] if settings.generate else []
    if results:
        answers = [answer for _, answer in evaluation.answers(len(shown), max_tokens=settings.max_tokens)]
    else:
        results, answers = _compute(evaluation, name, source, key, settings=settings, progress=progress)
        if directory is not None:
            for result in results:
                append_result(directory, result)
            refresh_final_card(directory)
    samples = [
        AnswerSample(question.text, question.answer, [answer.strip()])
        for question, answer in zip(shown, answers, strict=False)
    ]
    return results, samples


def _answer_settings(
    evaluation: ModelEvaluation, settings: RecordSettings
) -> dict[str, Any] | None:  # Any: JSON values
    """Return what the answers depend on, or None if there are none."""
    if not settings.generate or not evaluation.questions:
        return None
    return {"max_tokens": settings.max_tokens, "checks": [asdict(check) for check in settings.checks]}


def _stored_results(directory: Path | None, key: str, has_answers: bool) -> list[TaskResult]:
    """Return the stored results of an evaluation, or an empty list if they are incomplete."""
    stored = read_results(directory) if directory is not None else []
    by_part = {result.key.removeprefix(f"{key}-"): result for result in stored if result.key.startswith(key)}
    is_complete = "token" in by_part and (not has_answers or "answers" in by_part)
    return list(by_part.values()) if is_complete else []


def _compute(
    evaluation: ModelEvaluation,
    name: str,
    source: Source,
    key: str,
    *,
    settings: RecordSettings,
    progress: Progress,
) -> tuple[list[TaskResult], list[str]]:
    """Return the results of one model, and its answers."""
    names = {"task": Path(source.name).name, "data_version": source.digest()[:8], "key": key}
    progress(f"{name}: loss", 0, len(evaluation.examples))
    results = loss_results(record_losses(evaluation), **names)
    if not settings.generate or not evaluation.questions:
        return results, []
    total, max_tokens = len(evaluation.questions), settings.max_tokens
    answers = evaluation.all_answers(
        max_tokens=max_tokens, progress=lambda done: progress(f"{name}: answers", done, total)
    )
    checks = [(check.name, check.scores) for check in settings.checks]
    result = answer_result(answers, evaluation.questions, checks, max_tokens=max_tokens, **names)
    return [*results, result], answers
