"""Mixtures keep their shares at every point and read all records."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.data import WeightedSource
from whet.data.sources.hold_out import HoldOut, split_source
from whet.data.sources.source import open_source
from whet.data.sources.source_mixing import check_pass, mix
from whet.errors import DataError

sources = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.25, 0.3, 1, 1.5, 2, 7])), min_size=1, max_size=5
)


@given(sources)
def test_shares_hold_at_every_point_and_all_records_are_read(parts):
    lists = [[(which, n) for n in range(count)] for which, (count, _) in enumerate(parts)]
    weights = [weight for _, weight in parts]
    total = sum(weights)
    counts = Counter()
    order = [[] for _ in parts]
    for position, (which, n) in enumerate(mix(lists, weights), start=1):
        counts[which] += 1
        order[which].append(n)
        for other, weight in enumerate(weights):
            ahead = counts[other] - position * weight / total
            assert -len(parts) < ahead < 1 + 1e-9
    for which, (count, _) in enumerate(parts):
        # each source in order, restarting after the end, read completely at least once
        assert order[which] == [n % count for n in range(len(order[which]))]
        assert len(order[which]) >= count
    # minimal length: the last record completes a source for the first time
    assert any(len(order[which]) == count for which, (count, _) in enumerate(parts))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), "abababab"), ((2, 1), "abaabaab"), ((3, 1), "aabaaaba"), ((0.2, 0.1), "abaabaab")],
)
def test_order_is_fixed(weights, expected):
    """Hand-computed: the source furthest behind is next, the first of equals."""
    mixed = "".join(mix(["a" * 100, "b" * 100], weights))
    assert mixed[:8] == expected


def test_scaled_weights_are_equivalent():
    parts = ["a" * 7, "b" * 11, "c" * 5]
    assert list(mix(parts, [0.1, 0.2, 0.7])) == list(mix(parts, [1, 2, 7])) == list(mix(parts, [10, 20, 70]))


def counted(count):
    """A source that counts how often it was read."""

    class Source:
        read = 0

        def __iter__(self):
            self.read += 1
            return iter(range(count))

    return Source()


def test_extremely_long_pass_is_rejected_before_reading():
    with pytest.raises(
        DataError,
        match=r"would yield 50,000,050 records from 70 distinct ones before all of rare has been read",
    ):
        check_pass([counted(20), counted(50)], [1_000_000, 1], ["often", "rare"])


@pytest.mark.parametrize(
    ("counts", "weights", "reads"),
    [
        ((20, 50), (99, 1), (0, 0)),  # similar weights: no record is counted
        ((20, 50), (100_000, 1), (0, 1)),  # 5 million records: long, but plausible
        ((200_000, 20), (1_000_000, 1), (1, 1)),  # 20 million records, each at most 100 times
    ],
)
def test_plausible_weights_are_accepted_with_minimal_reading(counts, weights, reads):
    sources = [counted(count) for count in counts]
    check_pass(sources, weights, ["often", "rare"])
    assert tuple(source.read for source in sources) == reads


def texts(path, count):
    path.write_text("".join(json.dumps({"text": f"{path.stem}{number}"}) + "\n" for number in range(count)))
    return str(path)


@pytest.mark.parametrize(
    ("epochs", "counts"),
    [
        (2, {2: 40}),
        (1, {1: 40}),
        (0.25, {1: 10}),
        (2.1, {2: 36, 3: 4}),
        (0.001, {1: 1}),
    ],
)
def test_epochs_repeat_each_record_rounded_down_or_up(tmp_path, epochs, counts):
    parts = [
        WeightedSource(source=texts(tmp_path / "a.jsonl", 40), epochs=epochs),
        WeightedSource(source=texts(tmp_path / "b.jsonl", 5), epochs=1),
    ]
    source = open_source(parts, seed=3)
    first = Counter(record.fields["text"] for record in source)
    assert first == Counter(record.fields["text"] for record in source)
    assert Counter(count for text, count in first.items() if text[0] == "a") == counts
    assert [count for text, count in first.items() if text[0] == "b"] == [1] * 5
    other = open_source(parts, seed=4)
    is_random = epochs != int(epochs)
    assert (other.digest() != source.digest()) == is_random
    assert (Counter(record.fields["text"] for record in other) != first) == is_random
    assert source.name.startswith(f"{epochs:g} x ")


def test_validation_records_are_held_out_before_they_are_repeated(tmp_path):
    parts = [
        WeightedSource(source=texts(tmp_path / "a.jsonl", 40), epochs=2),
        WeightedSource(source=texts(tmp_path / "b.jsonl", 40), epochs=0.5),
    ]
    train, valid, _ = split_source(open_source(parts), HoldOut(0.25, seed=1))
    trained = Counter(record.fields["text"] for record in train)
    held_out = Counter(record.fields["text"] for record in valid)
    assert set(held_out.values()) == {1}
    assert len(held_out) == 20
    assert not trained.keys() & held_out.keys()
    twice = {text for text, count in trained.items() if text[0] == "a" and count == 2}
    assert len(twice) == 40 - sum(text[0] == "a" for text in held_out)
    kept = 40 - sum(text[0] == "b" for text in held_out)
    assert sum(count for text, count in trained.items() if text[0] == "b") == round(kept / 2)
