"""Call reward functions and check that they return finite numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.user_code import bind_arguments

_MAX_ERROR_CHARS = 2000
_PARAMETERS = ("prompt", "completion", "record")


class _InvalidRewardError(Exception):
    """A reward returned something other than a finite number."""


def bind_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` as a function of (prompt, completion, record), with `arguments` bound by name.

    Any: JSON values in, whatever a reward returns out.

    Raises:
        ValueError: the function's signature does not accept these arguments.
    """
    return bind_arguments(function, _PARAMETERS, arguments)


def call_reward(reward: Callable[..., Any], arguments: Sequence[Any]) -> float:  # Any: as above
    """Call a reward and return its value as a float.

    Raises:
        Exception: the reward raised it, or did not return a finite number.
    """
    value = reward(*arguments)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _InvalidRewardError(f"it returned {value!r}, which is not a number") from None
    if not math.isfinite(number):
        raise _InvalidRewardError(f"it returned {number}")
    return number


def failure_text(error: Exception) -> str:
    """Return a description of an exception that `call_reward` raised, truncated to 2000 characters."""
    text = str(error) if isinstance(error, _InvalidRewardError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_ERROR_CHARS]
