"""Labels of records: names, indices and targets, and the errors for invalid labels."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config.load_config import validate_config
from whet.data.class_balance import oversample_indices, select_held_out
from whet.data.class_labels import ClassLabels
from whet.data.sources.record_formats import normalize_record
from whet.data.synthetic.generators import generate
from whet.data.synthetic.shell_safety import CLASSES, FAULTS, shell_faults, shell_safety
from whet.errors import DataError

ONE = ClassLabels(["a", "b", "c"])
MANY = ClassLabels(["a", "b", "c"], multi_label=True)


@pytest.mark.parametrize(
    ("labels", "fields", "expected"),
    [
        (ONE, {"label": "b"}, (1.0,)),
        (ONE, {"label": 2}, (2.0,)),
        (MANY, {"labels": ["a", "c"]}, (1.0, 0.0, 1.0)),
        (MANY, {"labels": [0, 1, 1]}, (0.0, 1.0, 1.0)),  # one per class: targets
        (MANY, {"labels": [0, 2]}, (1.0, 0.0, 1.0)),  # otherwise class indices
        (MANY, {"labels": [1]}, (0.0, 1.0, 0.0)),
        (MANY, {"labels": []}, (0.0, 0.0, 0.0)),
        (MANY, {"label": "b"}, (0.0, 1.0, 0.0)),
        (ClassLabels(["1", "0"]), {"label": 1}, (0.0,)),  # a name has priority over an index
        (ClassLabels(["1", "2", "3"]), {"label": 3}, (2.0,)),
        (ClassLabels(["1", "2", "3"], multi_label=True), {"labels": [1, 3]}, (1.0, 0.0, 1.0)),
        (ClassLabels(["True", "False"]), {"label": True}, (0.0,)),
        (ClassLabels(["true", "false"]), {"label": False}, (1.0,)),
        (ClassLabels(["True", "False", "x"], multi_label=True), {"labels": [False]}, (0.0, 1.0, 0.0)),
        (ClassLabels(["ham", "spam"]), {"label": True}, (1.0,)),
        (ONE, {"label": 2.0}, (2.0,)),  # as in tables with missing values
        (ClassLabels(["1", "2", "3"]), {"label": 3.0}, (2.0,)),
        (MANY, {"labels": [0.3, 0.7, 0.9]}, (0.3, 0.7, 0.9)),
        (MANY, {"labels": [0, 0.5, True]}, (0.0, 0.5, 1.0)),
        (MANY, {"labels": [0.0, 2.0]}, (1.0, 0.0, 1.0)),
    ],
)
def test_label_values(labels, fields, expected):
    assert labels.label_values(fields) == expected


@pytest.mark.parametrize(
    ("labels", "fields", "message"),
    [
        (ONE, {"label": 3}, "label 3 is out of range: the 3 classes are 0 to 2"),
        (ONE, {"label": "d"}, "label 'd' is not in objective.classes"),
        (ONE, {"label": True}, "label True is not in objective.classes"),
        (MANY, {"label": False}, "label False is not in objective.classes"),
        (MANY, {"labels": [True, False]}, "label True is not in objective.classes"),
        (ONE, {"labels": ["a"]}, "the record has labels, but the objective expects a single label"),
        (MANY, {"labels": [0, 3]}, "label 3 is out of range"),
        (ONE, {"label": 1.5}, "label 1.5 is not a class: use a class name or an integer"),
        (MANY, {"labels": [0.3, 0.7]}, "the record has 2 soft labels, but there are 3 classes"),
        (MANY, {"labels": [0.3, 0.7, 1.5]}, "label 0.3 is not a class"),
        (MANY, {"labels": ["a", "cc"]}, "did you mean 'c'|label 'cc' is none"),
    ],
)
def test_invalid_labels_are_rejected(labels, fields, message):
    with pytest.raises(DataError, match=message):
        labels.label_values(fields)


def test_unquoted_yaml_classes_match_boolean_labels():
    section = validate_config(
        {
            "model": "m",
            "objective": {"kind": "classify", "classes": [True, False]},  # yes and no in YAML
            "data": {"train": "x"},
            "run": {"steps": 1, "batch_size": 1},
        }
    ).objective
    labels = ClassLabels(section.names)
    _, fields = normalize_record({"input": "x", "label": True}, "classification")
    assert labels.label_values(fields) == (0.0,)
    _, fields = normalize_record({"input": "x", "labels": [True]}, "classification")
    assert ClassLabels(section.names, multi_label=True).label_values(fields) == (1.0, 0.0)
    with pytest.raises(DataError, match="label 'yes' is not in objective.classes") as caught:
        labels.label_values({"label": "yes"})
    assert caught.value.hint == "classes: True, False; YAML parses yes and no as booleans, so quote them"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=80),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.integers(0, 5),
)
def test_held_out_texts_are_disjoint_and_stratified(drawn, share, seed):
    hashes = [str(text) for text, _ in drawn]
    label_of = {}
    for text, label in drawn:
        label_of.setdefault(str(text), label)
    labels = np.array([[label] for _, label in drawn])
    chosen = select_held_out(hashes, labels, share=share, seed=seed)
    valid = {h for h, c in zip(hashes, chosen, strict=True) if c}
    train = {h for h, c in zip(hashes, chosen, strict=True) if not c}
    assert not valid & train
    for label, count in Counter(label_of.values()).items():
        if count > 1:
            held_out_count = sum(label_of[text] == label for text in valid)
            assert 1 <= held_out_count <= count - 1
            assert abs(held_out_count - share * count) <= 1
    again = select_held_out(hashes, labels, share=share, seed=seed)
    assert np.array_equal(chosen, again)


def test_oversampling_repeats_rare_classes_and_keeps_all_examples():
    classes = np.array([0] * 10 + [1] * 3 + [2] * 4)
    indices = oversample_indices(classes, seed=0)
    assert np.bincount(classes[indices]).tolist() == [10, 10, 10]
    assert set(indices.tolist()) == set(range(17))
    assert np.array_equal(indices, oversample_indices(classes, seed=0))
    counts = np.bincount(indices)
    assert all(counts[classes == c].max() - counts[classes == c].min() <= 1 for c in range(3))


def test_shell_commands_are_imbalanced_distinct_and_use_other_templates_for_validation():
    train, valid = shell_safety("train", 3000), shell_safety("valid", 600)
    counts = Counter(record["label"] for record in train)
    assert set(counts) == set(CLASSES)
    assert 7 < counts["safe"] / counts["unsafe"] < 14
    assert len({record["input"] for record in train}) == 3000
    assert not {record["input"] for record in train} & {record["input"] for record in valid}
    assert shell_safety("train", 100) == train[:100]
    text = json.dumps([train, valid])
    assert "@" not in text.replace("@dns", "").replace("-d @", "")  # all placeholders were replaced


def test_shell_command_may_have_several_faults():
    sizes = Counter(len(record["labels"]) for record in shell_faults("train", 500))
    assert set(sizes) == {0, 1, 2, 3}
    assert all(set(record["labels"]) <= set(FAULTS) for record in shell_faults("valid", 50))
    assert len(generate("synth:shell-faults-valid:20")) == 20
    with pytest.raises(DataError, match="at most 20,000 commands are available"):
        shell_safety("train", 10**6)
