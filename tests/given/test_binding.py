"""Python objects passed with a config: placement of their placeholders, and errors."""

import datasets
import pytest
import yaml

from whet.config.load_config import to_dict, validate_config
from whet.data.sources.python_rows import PythonRows
from whet.errors import CheckpointError, ConfigError, DataError
from whet.given.binding import bind_config, check_given, insert_placeholders
from whet.given.given import Given, collect_given, placeholder_of

ROWS = [{"text": "a"}, {"text": "b"}]
BASE = {"model": "nano", "run": {"name": "x", "steps": 1, "batch_size": 1}}
TRAIN = placeholder_of("train", PythonRows("train", ROWS))
VALID = placeholder_of("valid", PythonRows("valid", ROWS[:1]))


def short(completion):
    return -len(completion)


def rate(answers, records):
    return 0.5


SHORT, RATE = placeholder_of("short", short), placeholder_of("rate", rate)


class Smoothed:
    def __init__(self, by=0.1):
        self.by = by


def test_objects_are_inserted_at_default_keys():
    config = {**BASE, "objective": {"kind": "grpo", "rewards": ["exact_match"]}, "eval": {"every": 2}}
    given = collect_given(
        {"train": ROWS, "validation": ROWS[:1]}, rewards={"short": short}, metrics={"rate": rate}
    )
    bound = bind_config(config, given)
    assert (bound.data.train, bound.data.valid, bound.data.test) == (TRAIN, VALID, None)
    assert [reward.function for reward in bound.objective.rewards] == ["exact_match", SHORT]
    assert [reward.label for reward in bound.objective.rewards] == ["exact_match", "short"]
    assert bound.eval.metrics == {"rate": RATE}
    assert config == {**BASE, "objective": {"kind": "grpo", "rewards": ["exact_match"]}, "eval": {"every": 2}}
    check_given(bound, given, "runs/x")
    assert to_dict(bind_config(bound, given)) == to_dict(bound), "binding again changes nothing"


def test_config_can_place_objects_explicitly():
    config = {
        **BASE,
        "data": {"train": [{"source": "python:mine", "weight": 2}, {"source": "synth:house:4", "weight": 1}]},
        "objective": {
            "kind": "grpo",
            "rewards": [{"function": "python:short", "weight": 0.5, "arguments": {"text": "python:plain"}}],
        },
    }
    given = collect_given({"mine": ROWS}, rewards={"short": short})
    bound = bind_config(config, given)
    assert bound.data.train[0].source == placeholder_of("mine", PythonRows("mine", ROWS))
    [reward] = bound.objective.rewards
    assert (reward.function, reward.weight) == (SHORT, 0.5)
    assert reward.arguments == {"text": "python:plain"}, "an argument is plain text"


def test_mix_parts_and_curriculum_refer_to_objects():
    part = {"objective": {"kind": "sft"}, "data": {"train": "python:one"}}
    config = {**BASE, "objective": {"kind": "mix", "parts": [part, {**part, "name": "other"}]}}
    bound = bind_config(config, collect_given({"one": ROWS}))
    assert {part.data.train for part in bound.objective.parts} == {
        placeholder_of("one", PythonRows("one", ROWS))
    }
    config = {**BASE, "data": {"curriculum": {"kind": "difficulty", "hard": "python:hard"}}}
    bound = bind_config(config, collect_given({"train": ROWS, "hard": ROWS}))
    assert bound.data.train == TRAIN
    assert bound.data.curriculum.hard.startswith("python:hard:")


def test_unnamed_records_are_training_data(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert bind_config(str(path), collect_given(ROWS)).data.train == TRAIN
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    assert bind_config(path, collect_given(splits)).data.train == TRAIN


def test_config_without_objects_is_unchanged():
    config = {**BASE, "data": {"train": "synth:house:4"}}
    assert to_dict(bind_config(config, Given())) == to_dict(validate_config(config))
    assert not Given()
    assert not collect_given()


def test_objective_object_becomes_the_kind():
    bound = insert_placeholders(
        {**BASE, "data": {"train": "synth:house:4"}}, collect_given(objective=Smoothed())
    )
    assert bound["objective"]["kind"] == placeholder_of("Smoothed", Smoothed())
    assert placeholder_of("Smoothed", Smoothed(0.2)) != placeholder_of("Smoothed", Smoothed())


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({"data": {"train": "a.jsonl"}}, {"data": ROWS}, r"data.train is set twice: a.jsonl.*\n.*remove one"),
        ({}, {"data": {"train": ROWS, "more": ROWS}}, r"data=\{'more': ...\}: no key.*\n.*python:more"),
        ({"data": {"train": "python:train"}}, {}, r"the config needs Python objects.*\n  data 'train' is missing"),
        (
            {"data": {"train": "python:train:0123456789abcdef"}},
            {"data": ROWS},
            "not those of the config:\n  data 'train' has changed: expected python:train:0123456789abcdef, but it is",
        ),
        ({}, {"data": ROWS, "rewards": {"short": short}}, "rewards= needs objective.kind: grpo, not sft"),
        (
            {"data": {"train": "synth:house:4"}, "objective": {"kind": "sft"}},
            {"objective": Smoothed()},
            "objective.kind is set twice: sft in the config, and objective=",
        ),
        (
            {"eval": {"metrics": {"rate": "a:b"}}, "data": {"train": "a", "valid": "b"}},
            {"metrics": {"rate": rate}},
            "eval.metrics.rate is set twice: a:b in the config",
        ),
        ({"data": 3}, {"data": ROWS}, "data: this must be a section with keys, not int"),
        ({}, {"data": ROWS, "metrics": {"rate": rate}}, "eval.metrics needs data.valid or data.test"),
    ],
)  # fmt: skip
def test_objects_that_do_not_match_the_config_are_rejected(config, given, message):
    with pytest.raises(ConfigError, match=message):
        bind_config({**BASE, **config}, collect_given(**given))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rewards": [short]}, ConfigError, r"rewards= must be a mapping.*\n.*rewards=\{'short': short\}"),
        ({"metrics": rate}, ConfigError, r"metrics= must be a mapping.*\n.*metrics=\{'rate': rate\}"),
        ({"rewards": {"short": 3}}, ConfigError, r"rewards=\{'short': ...\} is int, not a function"),
        ({"metrics": {"a b": rate}}, ConfigError, "the name 'a b' may only contain letters"),
        ({"data": {"train": ROWS, 3: ROWS}}, ConfigError, "the name 3 may only contain letters"),
        ({"data": {"valid": ROWS, "validation": ROWS}}, ConfigError, "two sources for 'valid'"),
        ({"data": (row for row in ROWS)}, DataError, "can be read only once"),
    ],
)
def test_objects_of_the_wrong_type_are_rejected(given, error, message):
    with pytest.raises(error, match=message):
        collect_given(**given)


def test_resume_requires_the_original_objects():
    config = {**BASE, "objective": {"kind": "grpo"}}
    original = collect_given({"train": ROWS, "valid": ROWS[:1]}, {"short": short}, {"rate": rate})
    bound = bind_config(config, original)
    with pytest.raises(CheckpointError) as caught:
        check_given(bound, Given(), "runs/x")
    assert caught.value.message.splitlines() == [
        "runs/x needs Python objects, which must be passed from Python:",
        f"  rewards 'short' is missing ({SHORT})",
        f"  data 'train' is missing ({TRAIN})",
        f"  data 'valid' is missing ({VALID})",
        f"  metrics 'rate' is missing ({RATE})",
    ]
    assert caught.value.hint == (
        'whet.resume("runs/x", rewards={"short": ...}, data={"train": ..., "valid": ...}, metrics={"rate": ...})'
    )
    other = collect_given(
        {"train": ROWS[::-1], "valid": ROWS[:1], "test": ROWS}, {"short": rate}, {"rate": rate}
    )
    with pytest.raises(CheckpointError) as caught:
        check_given(bound, other, "runs/x")
    first, *problems = caught.value.message.splitlines()
    assert first == "the Python objects passed are not those of runs/x:"
    assert [line.partition(":")[0].strip() for line in problems] == [
        "rewards 'short' has changed",
        "data 'train' has changed",
        "data 'test' is not expected",
    ]
