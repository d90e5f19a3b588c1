"""The loss mask: which turns are context only, and which tokens lie in a supervised span."""

from collections.abc import Sequence

import numpy as np

from whet.data.sources.chat_messages import Message


def masked_turns(messages: Sequence[Message]) -> set[int]:
    """Return the indices of messages that are marked as context only (`train: false` or `weight: 0`)."""
    return {index for index, message in enumerate(messages) if message.get("train") is False}


def tokens_inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the mask over tokens: true where any character of a token lies in a supervised span.

    Args:
        offsets: the first and the last character of each token, as tokenizers give them.
        spans: supervised ranges of characters.
    """
    if not len(offsets):
        return np.zeros(0, dtype=bool)
    start, end = np.array(offsets).T
    marks = np.zeros(len(start), dtype=bool)
    for low, high in spans:
        marks |= (end > low) & (start < high)
    return marks & (start < end)
