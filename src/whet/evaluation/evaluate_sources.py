"""Evaluate a language model on several sources: metrics of each source, and in total."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whet.config.data import WeightedSource
from whet.data.sources.source import Source, SourceSpec
from whet.data.tokens.examples import TooLong
from whet.data.tokens.tokenize import Question
from whet.errors import ConfigError
from whet.evaluation.data_options import DataOptions
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.exact_match import ExactMatch, compare_answers
from whet.models.language_model import LanguageModel
from whet.objectives.sft import SFT
from whet.training.loss import loss_weight

log = logging.getLogger("whet")


class AnswerCheck(Protocol):
    """A check of generated answers."""

    @property
    def name(self) -> str:
        """The name of the metric."""

    def fraction(self, answers: Sequence[str], questions: Sequence[Question]) -> float:
        """Return the fraction of answers that pass."""


@dataclass(frozen=True)
class GenerationSettings:
    """The responses to generate."""

    max_tokens: int
    checks: Sequence[AnswerCheck] = ()
    samples: int = 0  # the number of prompts to log with their responses
    progress: Callable[[int, int], None] = lambda *_: None


@dataclass(frozen=True)
class SourceEvaluation:
    """The evaluation of one source, in a form that can be added to that of others."""

    loss: dict[str, float]  # eval_loss and others
    weight: float  # what the loss is averaged over: supervised tokens, or the sum of their weights
    supervised_tokens: int
    supervised_bytes: int
    questions: list[Question]
    matches: ExactMatch | None = None
    answers: list[str] | None = None  # complete responses, if there are checks

    def metrics(self, checks: Sequence[AnswerCheck]) -> dict[str, float]:
        """Return all metrics."""
        metrics = dict(self.loss)
        if self.matches is not None:
            metrics |= self.matches.metrics()
        if self.answers is not None:
            metrics |= {check.name: check.fraction(self.answers, self.questions) for check in checks}
        return metrics


def sources_of(spec: SourceSpec) -> list[SourceSpec]:
    """Return the sources of a list, each as the spec of a source of its own."""
    if isinstance(spec, str):
        return [spec]
    # a weighted source keeps its own columns
    return [part if isinstance(part, str) else [part] for part in spec]


def evaluate_sources(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    spec: SourceSpec,
    *,
    options: DataOptions,
    max_length: int,
    too_long: TooLong = "truncate",
    generation: GenerationSettings | None = None,
) -> dict[str, Any]:  # Any: numbers, and a mapping of sources to their metrics
    """Return the metrics of a model on a source, or on a list of sources and on each of them.

    The metrics of a list are those of all of its records together: the loss is a mean over tokens. Those of
    weighted sources are over the mixture of records, in which a source may repeat.

    Args:
        model: the model to evaluate.
        tokenizer: its tokenizer.
        spec: the source, or a list of sources.
        options: how records are read.
        max_length: the largest number of tokens per example.
        too_long: how longer examples are treated.
        generation: the responses to generate; None: none.

    Returns:
        The metrics; with several sources also `sources`, the metrics of each by name.

    Raises:
        ConfigError: a source is named twice.
        DataError: a source cannot be read, or a record has no next-token loss.
    """
    specs = sources_of(spec)
    named = [(options.open(each), each) for each in specs]
    names = [_name(source, each) for source, each in named]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"the source {repeated[0]} is given twice", hint="name each source once")
    is_mixture = len(specs) > 1 and not isinstance(specs[0], str)
    sources = [source for source, _ in named] + ([options.open(spec)] if is_mixture else [])
    parts = [
        _evaluate(
            ModelEvaluation(
                model,
                tokenizer,
                source,
                max_length=max_length,
                too_long=too_long,
                supervise=options.supervise,
                supervise_thinking=options.supervise_thinking,
                template_args=options.template_args,
            ),
            source,
            generation,
        )
        for source in sources
    ]
    total = parts.pop() if is_mixture else _add(parts)
    checks = () if generation is None else generation.checks
    if len(specs) == 1:
        return total.metrics(checks)
    by_source = {
        name: {**part.metrics(checks), "supervised_tokens": part.supervised_tokens}
        for name, part in zip(names, parts, strict=True)
    }
    return {**total.metrics(checks), "sources": by_source}


def _name(source: Source, spec: SourceSpec) -> str:
    first = spec if isinstance(spec, str) else spec[0]
    return first.source if isinstance(first, WeightedSource) else source.name


def _evaluate(
    evaluation: ModelEvaluation, source: Source, generation: GenerationSettings | None
) -> SourceEvaluation:
    log.info("%s: %s", source.name, evaluation.summary)
    batches, questions = evaluation.batches, evaluation.questions
    answers = matches = None
    loss = evaluation.loss()
    if generation is not None and questions:
        for question, answer in evaluation.answers(generation.samples, max_tokens=generation.max_tokens):
            log.info(
                "  prompt    %s\n  expected  %s\n  response  %s\n", question.text, question.answer, answer
            )
        max_tokens, total, advance = generation.max_tokens, len(questions), generation.progress
        advance(0, total)

        def progress(done: int) -> None:
            advance(done, total)

        if generation.checks:
            answers = evaluation.all_answers(max_tokens=max_tokens, progress=progress)
            matches = compare_answers(answers, questions)
        else:  # exact match alone does not need complete responses
            matches = evaluation.exact_match(max_tokens=max_tokens, progress=progress)
    return SourceEvaluation(
        loss=loss,
        weight=loss_weight(SFT(), batches),
        supervised_tokens=sum(batch.supervised for batch in batches),
        supervised_bytes=sum(batch.supervised_bytes or 0 for batch in batches),
        questions=questions,
        matches=matches,
        answers=answers,
    )


def _add(parts: Sequence[SourceEvaluation]) -> SourceEvaluation:
    """Return the evaluation of the records of all sources together."""
    if len(parts) == 1:
        return parts[0]
    weight = math.fsum(part.weight for part in parts)
    mean = math.fsum(part.weight * part.loss["eval_loss"] for part in parts) / weight
    size = sum(part.supervised_bytes for part in parts)
    loss = {"eval_loss": mean, "eval_perplexity": math.inf if mean >= 700 else math.exp(mean)}
    if all("eval_bits_per_byte" in part.loss for part in parts):
        bits = [part.loss["eval_bits_per_byte"] * part.supervised_bytes for part in parts]
        loss["eval_bits_per_byte"] = math.fsum(bits) / size
    loss["eval_s"] = math.fsum(part.loss["eval_s"] for part in parts)
    matched = [part.matches for part in parts if part.matches is not None]
    answered = [part for part in parts if part.answers is not None]
    return SourceEvaluation(
        loss=loss,
        weight=weight,
        supervised_tokens=sum(part.supervised_tokens for part in parts),
        supervised_bytes=size,
        questions=[question for part in answered for question in part.questions],
        matches=ExactMatch(
            [correct for part in matched for correct in part.correct],
            [group for part in matched for group in part.groups],
        )
        if matched
        else None,
        answers=[answer for part in answered for answer in part.answers or ()] if answered else None,
    )
