"""Greedy answers to the questions of a data set, and exact match: how many are the one expected."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.tokens.tokenize import Question
from whet.generation.engine import generate_tokens
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

_ROWS = 64  # questions decoded together


@dataclass(frozen=True)
class ExactMatch:
    """Which questions were answered exactly as expected."""

    correct: list[bool]  # in the order of the questions
    groups: list[str | None]

    def metrics(self) -> dict[str, float]:
        """exact_match over all, and by group where records name one."""
        by_group: dict[str, list[bool]] = defaultdict(list)
        for correct, group in zip(self.correct, self.groups, strict=True):
            by_group["exact_match"].append(correct)
            if group is not None:
                by_group[f"exact_match_{group}"].append(correct)
        return {name: sum(found) / len(found) for name, found in by_group.items()}


def exact_match(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    questions: Sequence[Question],
    *,
    max_tokens: int = 256,
    pause: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
) -> ExactMatch:
    """Greedy answers against the expected ones, surrounding white space aside.

    A row is dropped as soon as its text can no longer become the answer: same verdict, less work. `pause` is
    called before each new token, and may raise; `progress` is called with the number of questions answered.
    """

    def possible(question: Question, tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd").lstrip()
        return question.answer.strip().startswith(text.rstrip())

    answers = greedy_answers(
        model,
        tokenizer,
        questions,
        max_tokens=max_tokens,
        possible=possible,
        pause=pause,
        progress=progress,
    )
    return compare_answers(answers, questions)


def compare_answers(answers: Sequence[str], questions: Sequence[Question]) -> ExactMatch:
    """Return which answers are the expected ones, surrounding white space aside."""
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
    possible: Callable[[Question, list[int]], bool] | None = None,
    pause: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Return the text that the model answers to each question, special tokens left out.

    Args:
        model: who answers.
        tokenizer: of the model.
        questions: what is asked; those of similar length are decoded together.
        max_tokens: longest answer.
        possible: an answer is broken off where this is false of its tokens so far.
        pause: called before each new token, and may raise.
        progress: called with the number of questions answered.
    """
    stops = stop_tokens(model, tokenizer)
    texts = [""] * len(questions)
    by_length = sorted(range(len(questions)), key=lambda index: len(questions[index].tokens))
    for start in range(0, len(by_length), _ROWS):
        chunk = by_length[start : start + _ROWS]

        def watch(row: int, tokens: list[int], chunk: list[int] = chunk) -> bool:
            pause()
            return possible is None or possible(questions[chunk[row]], tokens)

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
