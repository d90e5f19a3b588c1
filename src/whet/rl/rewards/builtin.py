"""Built-in reward functions: called with a prompt, a completion and a record, then their own arguments."""

# ruff: noqa: ARG001  # all rewards have the same first three parameters

import re
from collections.abc import Callable
from typing import Any

from whet.rl.rewards.json_schema import check_schema, is_valid, parse

RewardRecord = dict[str, Any]  # Any: JSON values

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?")


def exact_match(prompt: str, completion: str, record: RewardRecord, *, field: str | None = None) -> float:
    """Return 1 if the completion equals the expected answer, else 0; surrounding whitespace is ignored.

    Args:
        prompt: not used.
        completion: the generated text.
        record: the data record, which contains the expected answer.
        field: the record's field with the expected answer. Default: the last assistant message,
            `completion` or `answer`.
    """
    return float(completion.strip() == expected_answer(record, field).strip())


def numeric_match(
    prompt: str, completion: str, record: RewardRecord, *, field: str | None = None, tolerance: float = 1e-6
) -> float:
    """Return 1 if the last number in the completion matches the last one in the expected answer, else 0.

    Args:
        prompt: not used.
        completion: the generated text.
        record: the data record, which contains the expected answer.
        field: the record's field with the expected answer. Default: the last assistant message,
            `completion` or `answer`.
        tolerance: relative to the expected number, so only 0 matches an expected 0.

    Raises:
        ValueError: the expected answer contains no number.
    """
    answer = last_number(expected_answer(record, field))
    if answer is None:
        raise ValueError(f"the expected answer {expected_answer(record, field)!r} contains no number")
    number = last_number(completion)
    return float(number is not None and abs(number - answer) <= tolerance * abs(answer))


def regex(prompt: str, completion: str, record: RewardRecord, *, pattern: str) -> float:
    """Return 1 if `pattern` matches anywhere in the completion, else 0.

    `^` and `$` match the start and the end of the completion, and `.` also matches newlines.
    """
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def json_schema(
    prompt: str, completion: str, record: RewardRecord, *, schema: dict[str, Any] | bool
) -> float:
    """Return 1 if the entire completion is JSON that is valid under `schema`, else 0."""
    try:
        value = parse(completion.strip())
    except (ValueError, RecursionError):
        return 0.0
    return float(is_valid(value, schema))


def length(
    prompt: str, completion: str, record: RewardRecord, *, longest: int, shortest: int = 0, margin: int = 0
) -> float:
    """Return 0 for a completion of `shortest` to `longest` characters, and a negative value outside.

    Args:
        prompt: not used.
        completion: the generated text.
        record: not used.
        longest: the largest length without a penalty, in characters.
        shortest: the smallest length without a penalty, in characters.
        margin: characters over which the reward decreases linearly to -1 on both sides. 0: -1 without a ramp.
    """
    size = len(completion)
    excess = max(shortest - size, size - longest, 0)
    return -min(1.0, excess / margin) if margin else -float(excess > 0)


def expected_answer(record: RewardRecord, field: str | None = None) -> str:
    """Return the expected answer of a record.

    It is read from `field`, if that is set, else from the last assistant message, `completion` or `answer`.
    """
    if field is not None:
        if field not in record:
            raise KeyError(f"the record has no field {field!r} (its fields are {', '.join(record)})")
        return str(record[field])
    messages = record.get("messages") or [{}]
    if messages[-1].get("role") == "assistant":
        return str(messages[-1].get("content", ""))
    for name in ("completion", "answer"):
        if record.get(name) is not None:
            return str(record[name])
    raise KeyError("the record contains no expected answer: name its field (arguments: {field: NAME})")


def last_number(text: str) -> float | None:
    """Return the last number in a text (`1,234.5` and `-2e3` are numbers), or None."""
    numbers = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return float(numbers[-1].replace(",", "")) if numbers else None


BUILTIN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
}


def check_arguments(name: str, arguments: dict[str, Any]) -> None:  # Any: JSON values
    """Raise an error for arguments of a built-in reward that would fail with every completion."""
    if name == "regex":
        re.compile(arguments["pattern"])
    elif name == "json_schema":
        check_schema(arguments["schema"])
