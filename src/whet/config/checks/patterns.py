"""Regular expressions for the names of layers and weights, of which none takes long to match."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from whet.errors import shown

_MOST_CHARS = 1000
_MOST_REPEATS = 4  # in one alternative: each multiplies the time by the length of a name


@lru_cache(maxsize=256)  # each is asked for once per layer
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
        raise ValueError(f"{shown(pattern)} is not a regular expression: {error}") from error
    repeats = list(_repeats(tree))
    if any(_is_ambiguous(body) for body, _ in repeats):
        raise ValueError(
            f"{shown(pattern)} repeats what repeats or has alternatives, as in (a+)+ or (a|b)*: "
            "matching it may never end"
        )
    open_ended = [body for body, following in repeats if not _stops_at(body, following)]
    if len(open_ended) > _MOST_REPEATS * (1 + pattern.count("|")):
        raise ValueError(
            f"{shown(pattern)} has more than {_MOST_REPEATS} repeats (* or +) that may end anywhere: write "
            r"[^.]*\. instead of .*\. where one part of a name is meant"
        )
    return compiled


def _nodes(tree: Any) -> Iterator[tuple[str, Any, Any]]:  # Any: Python's parse trees of patterns
    """Every operation in a parsed pattern, with its arguments and the operation after it."""
    for index, (operation, arguments) in enumerate(tree):
        yield str(operation), arguments, tree[index + 1] if index + 1 < len(tree) else None
        left = [arguments]
        while left:
            value = left.pop()
            if hasattr(value, "getwidth"):
                yield from _nodes(value)
            elif isinstance(value, list | tuple):
                left += value


def _repeats(tree: Any) -> Iterator[tuple[Any, Any]]:  # Any: as above
    """What is repeated more than once, and what follows it."""
    for operation, arguments, following in _nodes(tree):
        if operation in ("MAX_REPEAT", "MIN_REPEAT") and arguments[1] > 1:
            yield arguments[2], following


def _stops_at(body: Any, following: Any) -> bool:  # Any: as above
    r"""Whether repeats of one character can only end at the literal after them, as in \d+\. or [^.]+\. do."""
    if following is None or str(following[0]) != "LITERAL" or body.getwidth() != (1, 1):
        return False
    return not re._compiler.compile(body).match(chr(following[1]))  # type: ignore[attr-defined]


def _is_ambiguous(body: Any) -> bool:  # Any: as above
    """Whether a name may fit what is repeated in several ways."""
    inside = {operation for operation, *_ in _nodes(body)}
    return bool(inside & {"MAX_REPEAT", "MIN_REPEAT", "BRANCH", "GROUPREF"})
