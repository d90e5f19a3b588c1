"""data.valid as a number holds out records: disjoint, complete, leak-free and deterministic."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.load_config import to_dict, validate_config
from whet.data.run_data import Needs, RunData
from whet.data.sources.hold_out import HoldOut, group_key, select_by_class, select_groups, split_source
from whet.data.sources.source import CombinedSource, Record, Skipped, open_source, validate_record
from whet.errors import ConfigError, DataError

sizes = st.one_of(st.floats(0.001, 0.999), st.integers(1, 60))
prompts = st.lists(st.integers(0, 40), min_size=2, max_size=120)


class Rows:
    """Records in memory, as a source."""

    def __init__(self, rows, name="rows"):
        self.rows, self.name, self.skipped = rows, name, Skipped()

    def __iter__(self):
        return (
            validate_record(Record(row, f"{self.name}#{number}"))
            for number, row in enumerate(self.rows, start=1)
        )

    def digest(self):
        return json.dumps(self.rows)


def rows_of(prompts):
    return [{"prompt": f"p{prompt}", "completion": f"c{index}"} for index, prompt in enumerate(prompts)]


def fields(source):
    return [record.fields for record in source]


@given(prompts=prompts, size=sizes, seed=st.integers(0, 2**40))
def test_split_is_disjoint_complete_and_leak_free(prompts, size, seed):
    rows, groups = rows_of(prompts), Counter(f"p{prompt}" for prompt in prompts)
    train, valid, _ = split_source(Rows(rows), HoldOut(size, seed))
    if len(groups) < 2 or size >= len(rows):
        with pytest.raises(DataError, match="so none can be held out|has only"):
            list(valid)
        return
    trained, held_out = fields(train), fields(valid)
    assert sorted(row["completion"] for row in (*trained, *held_out)) == sorted(
        row["completion"] for row in rows
    )
    assert {row["prompt"] for row in trained}.isdisjoint({row["prompt"] for row in held_out})
    assert trained
    assert held_out
    # within one group of the target
    target = min(max(1, round(size * len(rows)) if size < 1 else size), len(rows) - 1)
    left_out = min(count for prompt, count in groups.items() if prompt in {row["prompt"] for row in trained})
    if len(held_out) <= target:
        assert target - len(held_out) < left_out
    else:  # not even the smallest group fits
        assert len(held_out) == min(groups.values())


@given(prompts=prompts, size=sizes, seed=st.integers(0, 2**40), data=st.data())
def test_split_depends_on_groups_and_seed_only(prompts, size, seed, data):
    keys = np.array(prompts, dtype=np.uint64)
    settings = HoldOut(size, seed)
    shuffled = np.array(data.draw(st.permutations(prompts)), dtype=np.uint64)
    assert select_groups(keys, settings) == select_groups(shuffled, settings)


def test_seeds_select_different_records():
    keys = np.arange(1000, dtype=np.uint64)
    selections = [select_groups(keys, HoldOut(0.1, seed)) for seed in range(20)]
    assert {len(selection) for selection in selections} == {100}
    assert len({frozenset(selection) for selection in selections}) == 20
    times = Counter(key for selection in selections for key in selection)
    assert max(times.values()) < 10  # expected: 2 of 20, binomial; 10 or more has a probability below 1e-4


@given(classes=st.lists(st.integers(0, 4), min_size=2, max_size=100), share=st.floats(0.01, 0.5))
def test_each_class_gives_its_share(classes, share):
    keys, labels = np.arange(len(classes), dtype=np.uint64), np.array(classes)
    held_out = select_by_class(keys, labels, HoldOut(share, 0, by_class=True))
    for label, count in Counter(classes).items():
        if count > 1:
            taken = sum(labels[key] == label for key in held_out)
            assert taken == min(max(1, round(share * count)), count - 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "q", "completion": "a"}, {"prompt": " q ", "completion": "b"}),
        ({"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "b"}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q"}),
        (
            {"prompt": "q", "completion": "a"},
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]},
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}]},
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "y"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": "z"},
                ]
            },
        ),
        ({"text": "t"}, {"text": "t", "auth_weight": 0.1, "prov_entropy": 1}),
        ({"input": "t", "label": "a"}, {"input": "t", "label": "b"}),
        ({"features": [1, 2], "target": 1}, {"features": [1.0, 2.0], "target": 3}),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1, 5], "labels": [-100, 5]}),
    ],
)
def test_records_with_the_same_prompt_share_a_group(one, other):
    keys = [group_key(validate_record(Record(row, "x")), None) for row in (one, other)]
    assert keys[0] == keys[1]
    different = group_key(validate_record(Record({"prompt": "different"}, "x")), None)
    assert different != keys[0]


def test_group_field_keeps_its_values_together():
    rows = [{"text": f"t{n}", "user": n // 5} for n in range(50)]
    train, valid, _ = split_source(Rows(rows), HoldOut(0.2, 0, "user"))
    trained, held_out = ({row["user"] for row in fields(side)} for side in (train, valid))
    assert trained.isdisjoint(held_out)
    assert (len(trained), len(held_out)) == (8, 2)
    with pytest.raises(DataError, match=r"rows#1: the record has no field 'nobody', which data.group names"):
        list(split_source(Rows(rows), HoldOut(0.2, 0, "nobody"))[1])


def test_weighted_sources_are_split_once_and_validated_without_repetition():
    parts = [Rows(rows_of(range(100)), "a"), Rows(rows_of(range(90, 110)), "b")]
    source = CombinedSource(parts, [1.0, 1.0])
    train, valid, _ = split_source(source, HoldOut(0.1, 0))
    trained, held_out = ([row["prompt"] for row in fields(side)] for side in (train, valid))
    assert set(trained).isdisjoint(held_out)
    assert len(held_out) == 12
    assert {*trained, *held_out} == {f"p{n}" for n in range(110)}
    assert len(trained) > 150  # the small source repeats
    small = CombinedSource([Rows(rows_of(range(100)), "a"), Rows(rows_of([0]), "b")], [1.0, 1.0])
    sides = [split_source(small, HoldOut(0.1, seed)) for seed in range(200)]
    train = next(train for train, valid, _ in sides if "p0" in {row["prompt"] for row in fields(valid)})
    with pytest.raises(DataError, match="b: every record is held out"):
        list(train)


def test_digest_covers_the_split():
    def digests(rows, **settings):
        train, valid, _ = split_source(Rows(rows), HoldOut(**{"size": 0.2, "seed": 0, **settings}))
        return train.digest(), valid.digest()

    rows = [{"text": f"t{n}", "user": n} for n in range(10)]
    variants = [digests(rows), digests(rows, size=0.3), digests(rows, seed=1), digests(rows, group="user")]
    assert len({digest for pair in variants for digest in pair}) == 8
    assert digests(rows) == digests(rows) != digests(rows[1:])


def config(tmp_path, rows, **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return validate_config(
        {
            "model": "smollm2-135m-instruct",
            "data": {"train": str(path), **data},
            "run": {"name": "x", "steps": 1, "batch_size": 1},
        }
    )


@pytest.mark.parametrize(
    ("valid", "expected"), [(0.05, 0.05), (20, 20), ("0.1", "0.1"), ("v.jsonl", "v.jsonl"), (["a"], ["a"])]
)
def test_number_is_not_a_file_name(tmp_path, valid, expected):
    data = config(tmp_path, [], valid=valid).data
    assert data.valid == expected
    assert type(data.valid) is type(expected)
    values = to_dict(config(tmp_path, [], valid=valid))["data"]["valid"]
    assert values == expected


@pytest.mark.parametrize("valid", [0, 0.0, 1.0, 1.5, -1, -0.5])
def test_impossible_share_is_an_error(tmp_path, valid):
    with pytest.raises(ConfigError, match=r"data.valid: as a number, this must be a share between 0 and 1"):
        config(tmp_path, [], valid=valid)


def test_group_without_a_split_is_an_error(tmp_path):
    for data in ({"group": "user"}, {"group": "user", "valid": "v.jsonl"}):
        with pytest.raises(ConfigError, match="data.group needs data.valid to be a share or a count"):
            config(tmp_path, [], **data)


def test_hard_records_of_held_out_prompts_are_left_out(tmp_path):
    hard = tmp_path / "hard.jsonl"
    hard.write_text("".join(json.dumps(row) + "\n" for row in rows_of(range(60))))
    settings = config(
        tmp_path,
        rows_of(range(40)),
        valid=0.25,
        curriculum={"kind": "difficulty", "hard": str(hard)},
    )
    sources = RunData(settings, Needs()).sources
    held_out = {row["prompt"] for row in fields(sources["valid"])}
    assert len(held_out) == 10
    assert {row["prompt"] for row in fields(sources["hard"])} == {f"p{n}" for n in range(60)} - held_out


def test_bad_records_are_reported_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense\n" + "".join(json.dumps(row) + "\n" for row in rows_of(range(20))))
    train, valid, _ = split_source(open_source(str(path), on_bad="skip"), HoldOut(0.2, 0))
    assert (len(fields(train)), len(fields(valid))) == (16, 4)
    assert (train.skipped.count, valid.skipped.count) == (1, 0)
    with pytest.raises(DataError, match=r"rows.jsonl:1: not valid JSON"):
        list(split_source(open_source(str(path)), HoldOut(0.2, 0))[1])
