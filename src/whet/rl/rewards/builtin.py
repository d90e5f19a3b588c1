"""The rewards that come with whet: of a prompt, a completion and a record, then arguments of their own."""

# ruff: noqa: ARG001  # every reward is handed the same three

import re
from collections.abc import Callable
from typing import Any

from whet.rl.rewards.json_schema import is_valid, parse, refuse_unknown_keywords

RewardRecord = dict[str, Any]  # Any: JSON values

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?")


def exact_match(prompt: str, completion: str, record: RewardRecord, *, field: str | None = None) -> float:
    """1 for the expected answer, white space around it aside."""
    return float(completion.strip() == expected(record, field).strip())


def numeric_match(
    prompt: str, completion: str, record: RewardRecord, *, field: str | None = None, tolerance: float = 1e-6
) -> float:
    """1 if the last number of the completion is that of the expected answer, within a relative tolerance.

    Where 0 is expected, that is 0 alone.
    """
    wanted = last_number(expected(record, field))
    if wanted is None:
        raise ValueError(f"the expected answer {expected(record, field)!r} holds no number")
    found = last_number(completion)
    return float(found is not None and abs(found - wanted) <= tolerance * abs(wanted))


def regex(prompt: str, completion: str, record: RewardRecord, *, pattern: str) -> float:
    """1 if the pattern is found in the completion; `^` and `$` are its beginning and end."""
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def json_schema(
    prompt: str, completion: str, record: RewardRecord, *, schema: dict[str, Any] | bool
) -> float:
    """1 if the completion as a whole is JSON that a schema allows."""
    try:
        value = parse(completion.strip())
    except (ValueError, RecursionError):
        return 0.0
    return float(is_valid(value, schema))


def length(
    prompt: str, completion: str, record: RewardRecord, *, longest: int, shortest: int = 0, margin: int = 0
) -> float:
    """0 for a completion of `shortest` to `longest` characters, falling to -1 over `margin` on both sides."""
    size = len(completion)
    outside = max(shortest - size, size - longest, 0)
    return -min(1.0, outside / margin) if margin else -float(outside > 0)


def expected(record: RewardRecord, field: str | None = None) -> str:
    """The answer that a record holds: in the field named, or wherever its shape keeps it."""
    if field is not None:
        if field not in record:
            raise KeyError(f"the record has no field {field!r} (it has {', '.join(record)})")
        return str(record[field])
    messages = record.get("messages") or [{}]
    if messages[-1].get("role") == "assistant":
        return str(messages[-1].get("content", ""))
    for name in ("completion", "answer"):
        if record.get(name) is not None:
            return str(record[name])
    raise KeyError("the record holds no answer: name the field it is in (arguments: {field: NAME})")


def last_number(text: str) -> float | None:
    """The last number in a text, `1,234.5` and `-2e3` included."""
    found = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return float(found[-1].replace(",", "")) if found else None


BUILTIN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
}


def check_arguments(name: str, arguments: dict[str, Any]) -> None:  # Any: JSON values
    """Refuse arguments that would fail with every completion."""
    if name == "regex":
        re.compile(arguments["pattern"])
    elif name == "json_schema":
        refuse_unknown_keywords(arguments["schema"])
