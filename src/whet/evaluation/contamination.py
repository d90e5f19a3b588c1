"""Contamination: items of a benchmark task whose words also occur in training data."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from whet.data.sources.source import Record
from whet.errors import check_positive
from whet.evaluation.task_result import Contamination, TaskResult

DEFAULT_NGRAM = 13  # words
_WORD = re.compile(r"\w+")


def overlapping_items(
    items: Sequence[str], texts: Iterable[str], *, ngram: int = DEFAULT_NGRAM
) -> list[bool]:
    """Return whether each item shares an n-gram of words with any text, ignoring case and punctuation.

    An item with fewer words than `ngram` overlaps if all of its words occur in a text, in sequence.
    """
    check_positive(ngram=ngram)
    owners: dict[int, dict[tuple[str, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, item in enumerate(items):
        words = _words(item)
        size = min(ngram, len(words))
        for each in set(_ngrams(words, size)):
            owners[size][each].append(index)
    overlapping = [False] * len(items)
    for text in texts:
        words = _words(text)
        for size, known in owners.items():
            for each in _ngrams(words, size):
                for index in known.get(each, ()):
                    overlapping[index] = True
    return overlapping


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    if not size:  # an item without words overlaps with nothing
        return iter(())
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def record_texts(records: Iterable[Record]) -> Iterator[str]:
    """Yield the text of each record: all strings of its fields but roles, in order."""
    for record in records:
        yield " ".join(_strings(record.fields))


def _strings(value: Any) -> Iterator[str]:  # Any: JSON values
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name != "role":  # it would interrupt a text that continues in the next message
                yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def contamination_of(
    result: TaskResult, items: Sequence[str], texts: Iterable[str], *, ngram: int = DEFAULT_NGRAM
) -> Contamination:
    """Return how many items of a result overlap with texts, and the scores over the other items.

    Args:
        result: the result of a task.
        items: the text of each of its items, in order.
        texts: the training data.
        ngram: the number of words that make an overlap.
    """
    overlapping = overlapping_items(items, texts, ngram=ngram)
    clean = [index for index, overlaps in enumerate(overlapping) if not overlaps]
    clean_scores = {
        name: sum(scores[index] for index in clean) / len(clean)
        for name, scores in result.item_scores.items()
        if clean and len(scores) == len(overlapping)
    }
    return Contamination(ngram, sum(overlapping), len(overlapping), clean_scores)
