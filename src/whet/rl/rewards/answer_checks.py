"""Built-in rewards as metrics of `whet eval`: the fraction of answers that pass a check."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.data.tokens.tokenize import Question
from whet.error_boundary import error_text
from whet.errors import ConfigError, DataError
from whet.rl.rewards.builtin import BUILTIN, check_arguments

# the reward of each check, and how its argument is read; None: the check has no argument
_CHECKS: dict[str, tuple[str, Callable[[str], dict[str, Any]] | None]] = {  # Any: JSON values
    "json_valid": ("json_schema", None),
    "json_schema": ("json_schema", lambda path: {"schema": json.loads(Path(path).read_text())}),
    "numeric_match": ("numeric_match", None),
    "regex": ("regex", lambda pattern: {"pattern": pattern}),
}
CHECKS = tuple(_CHECKS)


@dataclass(frozen=True)
class AnswerCheck:
    """A check of generated answers, which is a built-in reward with fixed arguments."""

    name: str
    reward: str
    arguments: dict[str, Any]  # Any: JSON values

    def fraction(self, answers: Sequence[str], questions: Sequence[Question]) -> float:
        """Return the fraction of answers that pass.

        Raises:
            DataError: the check cannot read the expected answer of a record.
        """
        passed = self.scores(answers, questions)
        return sum(passed) / len(passed)

    def scores(self, answers: Sequence[str], questions: Sequence[Question]) -> list[float]:
        """Return 1 for each answer that passes, and 0 for the others; raises as `fraction`."""
        return [self._passes(answer, each) for answer, each in zip(answers, questions, strict=True)]

    def _passes(self, answer: str, question: Question) -> float:
        try:
            return BUILTIN[self.reward](question.text, answer, dict(question.record), **self.arguments)
        except (KeyError, ValueError) as error:
            raise DataError(
                f"{question.origin}: the check {self.name} failed: {error_text(error)}"
            ) from error


def parse_checks(specs: Sequence[str]) -> list[AnswerCheck]:
    """Return the checks that `NAME` or `NAME=ARGUMENT` describe.

    Raises:
        ConfigError: a check is unknown or repeated, or its argument is missing or invalid.
    """
    checks = [_parse_check(spec) for spec in specs]
    names = [check.name for check in checks]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the check {repeated[0]} is given twice", hint="run whet eval once for each")
    return checks


def _parse_check(spec: str) -> AnswerCheck:
    name, separator, argument = spec.partition("=")
    if name not in _CHECKS:
        raise ConfigError(f"unknown check {name!r}", hint=f"known: {', '.join(CHECKS)}")
    reward, read_arguments = _CHECKS[name]
    if (read_arguments is not None) != bool(separator):
        form = name if read_arguments is None else f"{name}={'FILE' if name == 'json_schema' else 'PATTERN'}"
        raise ConfigError(
            f"the check {spec!r} is incomplete or has an argument too many", hint=f"write {form}"
        )
    try:
        arguments = {"schema": True} if name == "json_valid" else {}
        if read_arguments is not None:
            arguments = read_arguments(argument)
        check_arguments(reward, arguments)
    except Exception as error:  # an unreadable file, invalid JSON, an invalid schema or pattern
        raise ConfigError(f"the check {spec!r} is invalid: {error_text(error)}") from error
    return AnswerCheck(name, reward, arguments)
