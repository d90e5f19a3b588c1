"""Greedy answers to the questions of a data set, and how many exactly match the expected answer."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.tokens.tokenize import Question
from whet.generation.engine import generate_tokens
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

_BATCH_SIZE = 64  # questions decoded as one batch


@dataclass(frozen=True)
class ExactMatch:
    """Whether each question was answered exactly as expected."""

    correct: list[bool]  # in the order of the questions
    groups: list[str | None]  # of the questions' records

    def metrics(self) -> dict[str, float]:
        """Return exact_match over all questions, and exact_match_GROUP for each group."""
        by_group: dict[str, list[bool]] = defaultdict(list)
        for correct, group in zip(self.correct, self.groups, strict=True):
            by_group["exact_match"].append(correct)
            if group is not None:
                by_group[f"exact_match_{group}"].append(correct)
        return {name: sum(values) / len(values) for name, values in by_group.items()}


def exact_match(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    questions: Sequence[Question],
    *,
    max_tokens: int = 256,
    pause: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
) -> ExactMatch:
    """Compare greedy answers with the expected ones, ignoring surrounding whitespace.

    Generation of an answer stops as soon as it can no longer match, which does not change the result.

    Args:
        model: generates the answers.
        tokenizer: the model's tokenizer.
        questions: the prompts, with their expected answers.
        max_tokens: the largest number of tokens per answer.
        pause: called before each new token; it may raise.
        progress: called with the number of answered questions.
    """

    def can_match(question: Question, tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd").lstrip()
        return question.answer.strip().startswith(text.rstrip())

    answers = greedy_answers(
        model,
        tokenizer,
        questions,
        max_tokens=max_tokens,
        can_match=can_match,
        pause=pause,
        progress=progress,
    )
    return compare_answers(answers, questions)


def compare_answers(answers: Sequence[str], questions: Sequence[Question]) -> ExactMatch:
    """Return which answers equal the expected ones, ignoring surrounding whitespace."""
    correct = [
        answer.strip() == question.answer.strip() for answer, question in zip(answers, questions, strict=True)
    ]
    return ExactMatch(correct, [question.group for question in questions])


def greedy_answers(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    questions: Sequence[Question],
    *,
    max_tokens: int = 256,
    can_match: Callable[[Question, list[int]], bool] | None = None,
    pause: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Return the greedy answer to each question as text, without special tokens.

    Args:
        model: generates the answers.
        tokenizer: the model's tokenizer.
        questions: the prompts; those of similar length are decoded as one batch.
        max_tokens: the largest number of tokens per answer.
        can_match: called with a question and the answer's tokens so far; returning False ends the answer.
        pause: called before each new token; it may raise.
        progress: called with the number of answered questions.
    """
    stops = stop_tokens(model, tokenizer)
    texts = [""] * len(questions)
    by_length = sorted(range(len(questions)), key=lambda index: len(questions[index].tokens))
    for start in range(0, len(by_length), _BATCH_SIZE):
        chunk = by_length[start : start + _BATCH_SIZE]

        def watch(row: int, tokens: list[int], chunk: list[int] = chunk) -> bool:
            pause()
            return can_match is None or can_match(questions[chunk[row]], tokens)

        outputs = generate_tokens(
            model,
            [questions[index].tokens for index in chunk],
            max_tokens=max_tokens,
            stop_tokens=stops,
            watch=watch,
        )
        for index, tokens in zip(chunk, outputs, strict=True):
            texts[index] = tokenizer.decode(tokens, skip_special_tokens=True)
        progress(start + len(chunk))
    return texts
