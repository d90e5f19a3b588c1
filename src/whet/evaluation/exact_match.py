"""Exact match: generate each answer and compare it with the one expected."""

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
    stops = stop_tokens(model, tokenizer)
    correct = [False] * len(questions)
    by_length = sorted(range(len(questions)), key=lambda index: len(questions[index].tokens))
    for start in range(0, len(by_length), _ROWS):
        chunk = by_length[start : start + _ROWS]
        answers = [questions[index].answer.strip() for index in chunk]

        def possible(row: int, tokens: list[int], answers: list[str] = answers) -> bool:
            pause()
            text = tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd").lstrip()
            return answers[row].startswith(text.rstrip())

        outputs = generate_tokens(
            model,
            [questions[index].tokens for index in chunk],
            max_tokens=max_tokens,
            stop_tokens=stops,
            watch=possible,
        )
        for index, answer, tokens in zip(chunk, answers, outputs, strict=True):
            correct[index] = tokenizer.decode(tokens, skip_special_tokens=True).strip() == answer
        progress(start + len(chunk))
    return ExactMatch(correct, [question.group for question in questions])
