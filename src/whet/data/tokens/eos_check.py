"""Whether examples teach a model to end its answers."""

from collections.abc import Collection, Sequence

import numpy as np

from whet.data.tokens.examples import StoredExamples

_MOST_LOOKED_AT = 1000  # examples, where a whole pass would take long

ENDLESS_HINT = (
    "raise data.max_length if answers are cut off; else the chat template ends turns with another token than "
    "the one that the tokenizer calls EOS"
)


def learned_ends(ids: np.ndarray, marks: np.ndarray, ends: Collection[int]) -> np.ndarray:
    """Places of the learned tokens that end an answer."""
    return np.flatnonzero(marks & np.logical_or.reduce([ids == end for end in ends]))


def endless(examples: StoredExamples, ends: Collection[int]) -> int:
    """How many examples were looked at, if none of them teaches the model to end its answer; else 0.

    They are from all over the records, and of a record that was split the last.
    """
    lasts = np.flatnonzero(np.diff(examples.records, append=-1))
    count = min(len(lasts), _MOST_LOOKED_AT)
    for index in lasts[np.linspace(0, len(lasts) - 1, count).astype(int)].tolist():
        ids, marks = examples.store.read(int(examples.starts[index]), int(examples.stops[index]))
        # the first token of an example has nothing before it to be predicted from
        if len(learned_ends(ids[1:], marks[1:], ends)):
            return 0
    return count


def endless_message(ends: Sequence[str], *, looked_at: int | None = None) -> str:
    """What is wrong with examples of which none teaches the model to stop, for a person."""
    none = "no example" if looked_at is None else f"none of {looked_at:,} examples"
    return f"{none} teaches the model to stop: {', '.join(ends)} is never learned"
