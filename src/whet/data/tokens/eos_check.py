"""Check whether the examples teach a model to end its completions."""

from collections.abc import Collection, Sequence

import numpy as np

from whet.data.tokens.examples import StoredExamples

_MAX_INSPECTED = 1000  # examples, because a complete pass would take long

NO_EOS_HINT = (
    "raise data.max_length if completions are truncated; otherwise the chat template ends turns with a token "
    "other than the EOS token of the tokenizer"
)


def supervised_ends(ids: np.ndarray, mask: np.ndarray, ends: Collection[int]) -> np.ndarray:
    """Return the positions of the supervised tokens that end a completion."""
    return np.flatnonzero(mask & np.logical_or.reduce([ids == end for end in ends]))


def count_without_eos(examples: StoredExamples, ends: Collection[int]) -> int:
    """Return the number of inspected examples if none supervises an end token, else 0.

    The examples are spread evenly over the records. Of a record that was split, the last window is inspected.
    """
    lasts = np.flatnonzero(np.diff(examples.records, append=-1))
    count = min(len(lasts), _MAX_INSPECTED)
    for index in lasts[np.linspace(0, len(lasts) - 1, count).astype(int)].tolist():
        ids, mask = examples.store.read(int(examples.starts[index]), int(examples.stops[index]))
        # the first token of an example is never a target
        if len(supervised_ends(ids[1:], mask[1:], ends)):
            return 0
    return count


def no_eos_message(ends: Sequence[str], *, inspected: int | None = None) -> str:
    """Return the warning for examples that do not teach the model to stop."""
    subject = "no example" if inspected is None else f"none of {inspected:,} examples"
    return f"{subject} teaches the model to stop: {', '.join(ends)} is never supervised"
