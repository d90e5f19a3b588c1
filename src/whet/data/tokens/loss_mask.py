"""The loss mask: messages that are context only, and tokens inside supervised spans."""

from collections.abc import Sequence

import numpy as np

from whet.data.sources.chat_messages import Message


def masked_turns(messages: Sequence[Message]) -> set[int]:
    """Return the indices of messages that are context only (`train: false` or `weight: 0`)."""
    return {index for index, message in enumerate(messages) if message.get("train") is False}


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
