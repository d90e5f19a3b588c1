"""The report's numbers: scikit-learn's, by scikit-learn's own functions, and those it does not have by hand."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics

from whet.evaluation.classifier_metrics import _intervals, marked_report, reliability, single_report, softmax
from whet.evaluation.linear_probe import LinearProbe
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, mark_metrics
from whet.reporting.text.classifier_text import classification_text, draw

NAMES = ["a", "b", "c", "d"]


def drawn(seed=0, count=200, classes=4, *, absent=()):
    rng = np.random.default_rng(seed)
    labels = rng.choice([c for c in range(classes) if c not in absent], size=count)
    logits = rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[labels]
    return softmax(logits), labels


@pytest.mark.parametrize("absent", [(), (2,)])
def test_cheap_metrics_are_scikit_learns(absent):
    for seed in range(5):
        chances, labels = drawn(seed, absent=absent)
        predicted = chances.argmax(1)
        found = confusion_metrics(confusion_matrix(labels, predicted, 4))
        assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
        assert found["f1_macro"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
        assert found["mcc"] == pytest.approx(metrics.matthews_corrcoef(labels, predicted))
        recalls = [np.mean(predicted[labels == c] == c) for c in np.unique(labels)]
        assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))


def test_metrics_of_marks_are_scikit_learns():
    rng = np.random.default_rng(1)
    marks, guessed = rng.random((80, 4)) < 0.3, rng.random((80, 4)) < 0.4
    found = mark_metrics(marks, guessed)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(marks, guessed))
    for average in ("macro", "micro"):
        assert found[f"f1_{average}"] == pytest.approx(metrics.f1_score(marks, guessed, average=average))


def test_a_report_holds_what_scikit_learn_computes():
    chances, labels = drawn(seed=5)
    predicted = chances.argmax(1)
    report = single_report(chances, labels, NAMES, show=lambda place: {"text": f"text {place}"})
    assert report["kappa"] == pytest.approx(metrics.cohen_kappa_score(labels, predicted))
    assert report["log_loss"] == pytest.approx(metrics.log_loss(labels, chances))
    assert report["f1_weighted"] == pytest.approx(metrics.f1_score(labels, predicted, average="weighted"))
    assert report["roc_auc_macro"] == pytest.approx(metrics.roc_auc_score(labels, chances, multi_class="ovr"))
    assert report["confusion"] == metrics.confusion_matrix(labels, predicted).tolist()
    theirs = metrics.classification_report(labels, predicted, target_names=NAMES, output_dict=True)
    for name in NAMES:
        assert report["per_class"][name]["precision"] == pytest.approx(theirs[name]["precision"])
        assert report["per_class"][name]["recall"] == pytest.approx(theirs[name]["recall"])
        assert report["per_class"][name]["support"] == theirs[name]["support"]
    brier = sum(metrics.brier_score_loss(labels == c, chances[:, c]) for c in range(4))
    assert report["brier"] == pytest.approx(brier)
    assert report["baselines"]["majority"]["accuracy"] == pytest.approx(np.bincount(labels).max() / 200)
    assert report["baselines"]["random"]["accuracy"] == pytest.approx(0.25, abs=0.1)
    worst = report["confused"][0]
    off = metrics.confusion_matrix(labels, predicted) - np.diag(
        np.diag(metrics.confusion_matrix(labels, predicted))
    )
    assert worst["count"] == off.max()
    assert worst["examples"][0]["text"].startswith("text ")
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1], [2]])  # some without a class
def test_guessing_at_random_is_the_mean_over_all_guesses(labels):
    labels = np.array(labels)
    guesses = itertools.product(range(3), repeat=len(labels))
    every = [confusion_metrics(confusion_matrix(labels, np.array(guess), 3)) for guess in guesses]
    report = single_report(np.full((len(labels), 3), 1 / 3), labels, ["a", "b", "c"])
    found = report["baselines"]["random"]
    assert found["accuracy"] == found["balanced_accuracy"] == 1 / 3
    for name, value in found.items():
        assert value == pytest.approx(np.mean([each[name] for each in every]), abs=0.03), name


def test_guessing_marks_at_random_is_the_mean_over_all_guesses():
    marks = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]])
    guesses = itertools.product((False, True), repeat=marks.size)
    every = [mark_metrics(marks == 1, np.array(guess).reshape(marks.shape)) for guess in guesses]
    report = marked_report(np.full(marks.shape, 0.5), marks, ["a", "b", "c"])
    found = report["baselines"]["random"]
    assert found["accuracy"] == 1 / 8
    for name, value in found.items():
        assert value == pytest.approx(np.mean([each[name] for each in every]), abs=0.03), name


def test_calibration_error_by_hand():
    sure = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    right = np.array([True, True, True, False, True, False])
    bins, error = reliability(sure, right)
    assert error == pytest.approx(4 / 6 * 0.2 + 2 / 6 * 0.05)
    assert [each["count"] for each in bins] == [2, 4]
    perfect, none = reliability(np.array([1.0, 1.0]), np.array([True, True]))
    assert none == 0
    assert perfect[0]["count"] == 2


def test_intervals_are_those_of_drawing_texts_anew():
    chances, labels = drawn(count=300)
    report = single_report(chances, labels, NAMES, seed=3)
    rng = np.random.default_rng(7)
    predicted = chances.argmax(1)
    plain = []
    for _ in range(500):
        places = rng.integers(300, size=300)
        plain.append(metrics.matthews_corrcoef(labels[places], predicted[places]))
    np.testing.assert_allclose(report["intervals"]["mcc"], np.percentile(plain, (2.5, 97.5)), atol=0.02)
    low, high = report["intervals"]["accuracy"]
    assert low < report["accuracy"] < high
    assert single_report(chances, labels, NAMES, seed=3)["intervals"] == report["intervals"]


def test_reports_of_one_class_or_one_text_stay_finite():
    chances = np.array([[0.7, 0.2, 0.1]])
    report = single_report(chances, np.array([0]), ["a", "b", "c"])
    assert report["accuracy"] == 1
    assert report["roc_auc_macro"] is None
    json.dumps(report, allow_nan=False)
    json.dumps(marked_report(np.array([[0.7, 0.2]]), np.array([[0, 0]]), ["a", "b"]), allow_nan=False)


def test_a_report_of_marks():
    rng = np.random.default_rng(2)
    marks = rng.random((120, 3)) < 0.4
    chances = np.clip(marks * 0.4 + rng.random((120, 3)) * 0.6, 0, 1)
    report = marked_report(chances, marks.astype(float), ["x", "y", "z"])
    assert report["f1_samples"] == pytest.approx(
        metrics.f1_score(marks, chances > 0.5, average="samples", zero_division=1)
    )
    assert report["hamming"] == pytest.approx(metrics.hamming_loss(marks, chances > 0.5))
    assert report["per_class"]["y"]["mcc"] == pytest.approx(
        metrics.matthews_corrcoef(marks[:, 1], chances[:, 1] > 0.5)
    )
    clipped = chances.clip(1e-15, 1 - 1e-15)
    assert report["log_loss"] == pytest.approx(
        np.mean([metrics.log_loss(marks[:, c], clipped[:, c]) for c in range(3)])
    )
    low, high = report["intervals"]["accuracy"]
    assert low <= report["accuracy"] <= high


def test_a_report_of_soft_labels_scores_them_as_they_are_and_counts_those_above_one_half():
    rng = np.random.default_rng(3)
    targets, chances = rng.random((80, 3)), rng.random((80, 3))
    targets[0, 0] = 0.5  # not above
    report = marked_report(chances, targets, ["x", "y", "z"])
    t, p = torch.from_numpy(targets), torch.from_numpy(chances)
    assert report["log_loss"] == pytest.approx(F.binary_cross_entropy(p, t).item(), rel=1e-12)
    assert report["brier"] == pytest.approx(F.mse_loss(p, t).item(), rel=1e-12)
    hard = marked_report(chances, targets > 0.5, ["x", "y", "z"])
    scored = {"log_loss", "brier"}
    assert {k: v for k, v in report.items() if k not in scored} == {
        k: v for k, v in hard.items() if k not in scored
    }


def test_a_report_of_marks_of_one_class(tmp_path):
    marks = np.array([[1], [1], [0], [0], [0]], dtype=bool)
    chances = np.array([[0.9], [0.2], [0.7], [0.1], [0.3]])
    report = marked_report(chances, marks, ["x"])
    assert report["per_class"]["x"]["confusion"] == [[2, 1], [1, 1]]
    assert {name: report["per_class"]["x"][name] for name in ("precision", "recall", "f1", "support")} == {
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "support": 2,
    }
    padded, guessed = (np.pad(each, ((0, 0), (0, 1))) for each in (marks, chances > 0.5))
    for average, unsaid in (("weighted", 0), ("samples", 1)):
        theirs = metrics.f1_score(padded, guessed, average=average, zero_division=unsaid)
        assert report[f"f1_{average}"] == pytest.approx(theirs)
    assert report["hamming"] == pytest.approx(2 / 5)
    json.dumps(report, allow_nan=False)
    draw(report, tmp_path / "plots.png")
    report["throughput"] = {"examples_per_s": 10.0, "tokens_per_s": 100.0, "seconds": 20.0}
    assert "0.500" in classification_text(report)


@pytest.mark.parametrize("seed", range(3))
def test_each_class_of_marks_is_scikit_learns(seed):
    rng = np.random.default_rng(seed)
    marks, chances = rng.random((50, 4)) < [0.5, 0.2, 0, 1], rng.random((50, 4)) * [1, 1, 1, 0.5]
    report = marked_report(chances, marks, NAMES)
    theirs = metrics.precision_recall_fscore_support(marks, chances > 0.5, zero_division=0)
    tables = metrics.multilabel_confusion_matrix(marks, chances > 0.5)
    for place, name in enumerate(NAMES):
        ours = report["per_class"][name]
        found = [ours[key] for key in ("precision", "recall", "f1", "support")]
        np.testing.assert_allclose(found, [column[place] for column in theirs])
        assert ours["confusion"] == tables[place].tolist()
    weighted = metrics.f1_score(marks, chances > 0.5, average="weighted", zero_division=0)
    assert report["f1_weighted"] == pytest.approx(weighted)


def test_intervals_of_many_classes_take_no_matrix_for_each_sample():
    matrix = np.diag(np.ones(2000, dtype=int))
    matrix[0, 1] = 500
    tracemalloc.start()
    found = _intervals(matrix, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * matrix.nbytes
    low, high = found["accuracy"]
    assert low < 0.8 < high


def test_people_get_a_table_and_a_picture(tmp_path):
    chances, labels = drawn()
    for report in (
        single_report(chances, labels, NAMES, show=lambda place: {"text": "x" * 100}),
        marked_report(chances, np.eye(4)[labels], NAMES),
    ):
        report["throughput"] = {"examples_per_s": 10.0, "tokens_per_s": 100.0, "seconds": 20.0}
        text = classification_text(report)
        assert f"{report['f1_macro']:.3f}" in text
        assert "majority" in text
        path = draw(report, tmp_path / "plots.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert draw(report, path) == path  # again, over the old one


def test_a_probe_draws_a_line_and_no_more():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5))
    straight, crossed = (x[:, 0] > 0).astype(int), ((x[:, 0] > 0) ^ (x[:, 1] > 0)).astype(int)
    assert (LinearProbe().fit(x[:200], straight[:200]).predict(x[200:]) == straight[200:]).mean() > 0.9
    assert (LinearProbe().fit(x[:200], crossed[:200]).predict(x[200:]) == crossed[200:]).mean() < 0.75
    both = np.stack([straight, crossed, np.ones(300, dtype=int)], axis=1)
    assert LinearProbe().fit(x[:200], both[:200]).predict(x[200:]).shape == (100, 3)
