"""Regular expressions for names of layers and weights, restricted to those that match in bounded time."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from whet.errors import short_repr

_MAX_CHARACTERS = 1000
_MAX_REPEATS = 4  # per alternative: each multiplies the matching time by the length of a name


@lru_cache(maxsize=256)  # called once per layer
def compile_pattern(pattern: str, *, before: str = "") -> re.Pattern[str]:
    """Compile a pattern from a config.

    Args:
        pattern: The regular expression.
        before: A regular expression to put in front of it.

    Raises:
        ValueError: It is not a regular expression, or its matching time may grow exponentially.
    """
    if len(pattern) > _MAX_CHARACTERS:
        raise ValueError(f"a pattern can have at most {_MAX_CHARACTERS} characters, not {len(pattern):,}")
    try:
        re.compile(pattern)  # without `before`: its parentheses must be balanced
        compiled = re.compile(f"{before}({pattern})" if before else pattern)
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]  # the parser that re.compile uses
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{short_repr(pattern)} is not a regular expression: {error}") from error
    repeats = list(_repeats(tree))
    if any(_is_ambiguous(body) for body, _ in repeats):
        raise ValueError(
            f"{short_repr(pattern)} has a repeat or an alternative inside a repeat, as in (a+)+ or (a|b)*: "
            "matching it could take exponential time"
        )
    open_ended = [body for body, following in repeats if not _stops_at(body, following)]
    if len(open_ended) > _MAX_REPEATS * (1 + pattern.count("|")):
        raise ValueError(
            f"{short_repr(pattern)} has more than {_MAX_REPEATS} repeats (* or +) that can end anywhere: "
            r"write [^.]*\. instead of .*\. to match one component of a name"
        )
    return compiled


def _nodes(tree: Any) -> Iterator[tuple[str, Any, Any]]:  # Any: Python's parse trees of patterns
    """Yield every operation of a parsed pattern with its arguments and the operation after it."""
    for index, (operation, arguments) in enumerate(tree):
        yield str(operation), arguments, tree[index + 1] if index + 1 < len(tree) else None
        pending = [arguments]
        while pending:
            value = pending.pop()
            if hasattr(value, "getwidth"):
                yield from _nodes(value)
            elif isinstance(value, list | tuple):
                pending += value


def _repeats(tree: Any) -> Iterator[tuple[Any, Any]]:  # Any: as above
    """Yield the body of every repeat, and the operation after it."""
    for operation, arguments, following in _nodes(tree):
        if operation in ("MAX_REPEAT", "MIN_REPEAT") and arguments[1] > 1:
            yield arguments[2], following


def _stops_at(body: Any, following: Any) -> bool:  # Any: as above
    r"""Return whether a repeated character can only end at the literal after it, as in \d+\. or [^.]+\."""
    if following is None or str(following[0]) != "LITERAL" or body.getwidth() != (1, 1):
        return False
    return not re._compiler.compile(body).match(chr(following[1]))  # type: ignore[attr-defined]


def _is_ambiguous(body: Any) -> bool:  # Any: as above
    """Return whether a name may match the body of a repeat in several ways."""
    operations = {operation for operation, *_ in _nodes(body)}
    return bool(operations & {"MAX_REPEAT", "MIN_REPEAT", "BRANCH", "GROUPREF"})
