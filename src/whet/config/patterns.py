"""Regular expressions for the names of layers and weights, of which none takes long to match."""

import re
from collections.abc import Iterator
from typing import Any

_MOST_CHARS = 1000
_MOST_REPEATS = 4  # in one alternative: each multiplies the time by the length of a name


def compile_pattern(pattern: str, *, before: str = "") -> re.Pattern[str]:
    """Compile a config's pattern, after `before` where given.

    Raises:
        ValueError: it is not a regular expression, or one whose time may grow exponentially with the name.
    """
    if len(pattern) > _MOST_CHARS:
        raise ValueError(f"a pattern has at most {_MOST_CHARS} characters, and this has {len(pattern):,}")
    try:
        re.compile(pattern)  # alone first: its brackets must match within it
        compiled = re.compile(f"{before}({pattern})" if before else pattern)
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]  # the one that compile has used
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{_shown(pattern)} is not a regular expression: {error}") from error
    repeats = list(_repeats(tree))
    if any(_is_ambiguous(body) for body in repeats):
        raise ValueError(
            f"{_shown(pattern)} repeats what repeats or has alternatives, as in (a+)+ or (a|b)*: "
            "matching it may never end"
        )
    if len(repeats) > _MOST_REPEATS * (1 + pattern.count("|")):
        raise ValueError(f"{_shown(pattern)} has more than {_MOST_REPEATS} repeats (* or +)")
    return compiled


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 120 else f"{pattern[:100]}...")


def _nodes(tree: Any) -> Iterator[tuple[str, Any]]:  # Any: Python's parse trees of patterns
    """Every operation in a parsed pattern, with its arguments."""
    for operation, arguments in tree:
        yield str(operation), arguments
        left = [arguments]
        while left:
            value = left.pop()
            if hasattr(value, "getwidth"):
                yield from _nodes(value)
            elif isinstance(value, list | tuple):
                left += value


def _repeats(tree: Any) -> Iterator[Any]:  # Any: as above
    """What is repeated more than once."""
    for operation, arguments in _nodes(tree):
        if operation in ("MAX_REPEAT", "MIN_REPEAT") and arguments[1] > 1:
            yield arguments[2]


def _is_ambiguous(body: Any) -> bool:  # Any: as above
    """Whether a name may fit what is repeated in several ways."""
    inside = {operation for operation, _ in _nodes(body)}
    return bool(inside & {"MAX_REPEAT", "MIN_REPEAT", "BRANCH", "GROUPREF"})
