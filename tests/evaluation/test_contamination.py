"""Overlap of benchmark items with training data, against a search in the text."""

import random

import pytest

from whet.data.clean.record_turns import record_texts
from whet.data.sources.source import Record
from whet.errors import ConfigError, WhetError
from whet.evaluation.contamination import contamination_of, overlapping_items
from whet.evaluation.task_result import Score, TaskResult


def naive_overlap(item, texts, ngram):
    """Search for each n-gram of an item as a string."""
    words = item.lower().split()
    size = min(ngram, len(words))
    pieces = [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]
    return any(f" {piece} " in f" {text.lower()} " for text in texts for piece in pieces)


@pytest.mark.parametrize("ngram", [2, 3, 13])
def test_overlaps_equal_a_search_in_the_text(ngram):
    rng = random.Random(ngram)
    words = [f"w{index}" for index in range(5)]
    texts = [" ".join(rng.choices(words, k=rng.randint(0, 12))) for _ in range(5)]
    items = [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(60)]
    overlaps = overlapping_items(items, texts, ngram=ngram)
    assert overlaps == [naive_overlap(item, texts, ngram) for item in items]
    assert len({*overlaps}) == 2


def test_case_and_punctuation_do_not_matter():
    assert overlapping_items(["Turn on: the lamp!"], ["please turn on the LAMP now"]) == [True]
    assert overlapping_items(["...", ""], ["anything", ""]) == [False, False]
    with pytest.raises(ConfigError):
        overlapping_items(["a"], ["a"], ngram=0)


def test_the_text_of_a_record_has_all_its_strings():
    messages = [{"role": "user", "content": "Open the door"}, {"role": "assistant", "content": "done"}]
    record = Record({"messages": messages, "weight": 1.0}, "train.jsonl:1")
    assert list(record_texts([record])) == ["Open the door done"]


def test_scores_without_overlapping_items():
    result = TaskResult("k", "t", "1", 0, 3, None, False, {"acc": Score(2 / 3, None)}, ["a", "b", "c"])
    result.item_scores["acc"] = [1.0, 0.0, 1.0]
    contamination = contamination_of(
        result, ["open the door", "close it", "dim the lamp"], ["Open the door."]
    )
    assert (contamination.overlapping, contamination.items) == (1, 3)
    assert contamination.clean_scores == {"acc": 0.5}


def test_contamination_needs_a_run(tiny_directory):
    import whet

    with pytest.raises(WhetError, match="is not a run"):
        whet.benchmark(tiny_directory, ["task.yaml"], contamination=True)
