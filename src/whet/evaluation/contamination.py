"""Contamination: items of a benchmark task whose words also occur in training data."""

from collections.abc import Iterable, Sequence

from whet.data.clean.word_ngrams import DEFAULT_NGRAM, NgramIndex, split_words
from whet.errors import check_positive
from whet.evaluation.task_result import Contamination, TaskResult


def overlapping_items(
    items: Sequence[str], texts: Iterable[str], *, ngram: int = DEFAULT_NGRAM
) -> list[bool]:
    """Return whether each item shares an n-gram of words with any text, ignoring case and punctuation.

    An item with fewer words than `ngram` overlaps if all of its words occur in a text, in sequence.
    """
    check_positive(ngram=ngram)
    index = NgramIndex(map(split_words, items), ngram, short_items=True)
    overlapping = [False] * len(items)
    for text in texts:
        for match in index.search(split_words(text)):
            overlapping[match.item] = True
    return overlapping


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
