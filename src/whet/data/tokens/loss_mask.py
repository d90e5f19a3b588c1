"""The loss mask: which turns are supervised, and the weight of each token."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from whet.data.sources.chat_messages import Message
from whet.data.sources.message_weights import has_part_weight
from whet.errors import DataError

Supervise = str | Sequence[str]  # assistant, last, all, completion, or a list of roles
# the examples of a conversation whose earlier turns the template rewrites: as few as possible, the last turn
# only, or one per turn
Turns = Literal["auto", "last", "each"]
RULES = ("assistant", "last", "all", "completion")
WeightedSpan = tuple[int, int, float]


def check_supervise(supervise: Supervise) -> Supervise:
    """Return the rule if it is valid, and a list of roles as a tuple."""
    if isinstance(supervise, str):
        if supervise not in RULES:
            raise DataError(
                f"supervise must be one of {', '.join(RULES)} or a list of roles, not {supervise!r}"
            )
        return supervise
    if not supervise or not all(isinstance(role, str) and role for role in supervise):
        raise DataError("supervise as a list must name at least one role, such as [assistant, tool]")
    return tuple(supervise)


def selected_turns(messages: Sequence[Message], supervise: Supervise) -> list[int]:
    """Return the indices of the turns that a rule other than `all` supervises, whatever their weights.

    An assistant message without a prompt before it is never selected: templates cannot render its prompt.
    """
    roles = [message["role"] for message in messages]
    wanted: Collection[str] = ("assistant",) if isinstance(supervise, str) else supervise
    turns = [i for i, role in enumerate(roles) if role in wanted and (i > 0 or role != "assistant")]
    if supervise == "last":
        return turns[-1:]
    if supervise == "completion":
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        return [i for i in turns if i > last_user]
    return turns


def turn_weight(message: Message) -> float:
    """Return the weight of a message's tokens, without that of its parts."""
    weight: float = message.get("weight", 1.0)
    return weight


def is_supervised(message: Message) -> bool:
    """Return whether any character of a message may have a weight above 0."""
    return turn_weight(message) > 0 or has_part_weight(message)


def overlay(base: Sequence[WeightedSpan], top: Sequence[WeightedSpan]) -> list[WeightedSpan]:
    """Return sorted spans with the weights of `top` where it has any, and those of `base` elsewhere."""
    result = list(top)
    for low, high, weight in base:
        start = low
        for top_low, top_high, _ in sorted(top):
            if top_high > start and top_low < high:
                result.append((start, max(start, top_low), weight))
                start = max(start, top_high)
        result.append((start, max(start, high), weight))
    return sorted(span for span in result if span[0] < span[1])


def tokens_inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a mask over tokens that is true if any character of a token is in a supervised span.

    Args:
        offsets: Start and end character of each token, as returned by tokenizers.
        spans: Supervised character ranges.
    """
    if not len(offsets):
        return np.zeros(0, dtype=bool)
    start, end = np.array(offsets).T
    mask = np.zeros(len(start), dtype=bool)
    for low, high in spans:
        mask |= (end > low) & (start < high)
    return mask & (start < end)


def token_weights(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], weights: Sequence[float]
) -> np.ndarray:
    """Return the weight of each token: the largest of those of the spans that it has a character in, or 0.

    Args:
        offsets: Start and end character of each token, as returned by tokenizers.
        spans: Supervised character ranges.
        weights: The weight of each span.
    """
    if not len(offsets):
        return np.zeros(0, dtype=np.float32)
    start, end = np.array(offsets).T
    result = np.zeros(len(start), dtype=np.float32)
    for (low, high), weight in zip(spans, weights, strict=True):
        inside = (end > low) & (start < high)
        result[inside] = np.maximum(result[inside], np.float32(weight))
    result[start >= end] = 0
    return result
