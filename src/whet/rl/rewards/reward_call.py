"""One call of a reward: what it is given, and what counts as an answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.user_code import bind_arguments

_SHOWN = 2000  # characters of an error
_PARAMETERS = ("prompt", "completion", "record")


class _NoNumberError(Exception):
    """A reward returned something else."""


def bind_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of (prompt, completion, record); a ValueError where a reward cannot be called so.

    Any: JSON values in, whatever a reward returns out.
    """
    return bind_arguments(function, _PARAMETERS, arguments)


def judge(reward: Callable[..., Any], arguments: Sequence[Any]) -> float:  # Any: as above
    """Call a reward and return the finite number that it must give."""
    value = reward(*arguments)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _NoNumberError(f"it returned {value!r}, which is no number") from None
    if not math.isfinite(number):
        raise _NoNumberError(f"it returned {number}")
    return number


def failure_text(error: Exception) -> str:
    """Return why a call brought no number."""
    text = str(error) if isinstance(error, _NoNumberError) else f"{type(error).__name__}: {error}"
    return text[:_SHOWN]
