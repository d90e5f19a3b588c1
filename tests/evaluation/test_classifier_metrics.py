"""The metrics of classification reports, against scikit-learn and explicit computations."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics

from whet.evaluation.classifier_metrics import (
    _intervals,
    multi_label_report,
    reliability,
    single_label_report,
    softmax,
)
from whet.evaluation.linear_probe import LinearProbe
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, multi_label_metrics
from whet.reporting.text.classifier_text import classification_text, write_classifier_plots

NAMES = ["a", "b", "c", "d"]


def random_predictions(seed=0, count=200, classes=4, *, absent=()):
    rng = np.random.default_rng(seed)
    labels = rng.choice([c for c in range(classes) if c not in absent], size=count)
    logits = rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[labels]
    return softmax(logits), labels


@pytest.mark.parametrize("absent", [(), (2,)])
def test_confusion_metrics_equal_scikit_learn(absent):
    for seed in range(5):
        probabilities, labels = random_predictions(seed, absent=absent)
        predicted = probabilities.argmax(1)
        results = confusion_metrics(confusion_matrix(labels, predicted, 4))
        assert results["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
        assert results["f1_macro"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
        assert results["mcc"] == pytest.approx(metrics.matthews_corrcoef(labels, predicted))
        recalls = [np.mean(predicted[labels == c] == c) for c in np.unique(labels)]
        assert results["balanced_accuracy"] == pytest.approx(np.mean(recalls))


def test_multi_label_metrics_equal_scikit_learn():
    rng = np.random.default_rng(1)
    labels, guessed = rng.random((80, 4)) < 0.3, rng.random((80, 4)) < 0.4
    results = multi_label_metrics(labels, guessed)
    assert results["accuracy"] == pytest.approx(metrics.accuracy_score(labels, guessed))
    for average in ("macro", "micro"):
        assert results[f"f1_{average}"] == pytest.approx(metrics.f1_score(labels, guessed, average=average))


def test_report_equals_scikit_learn():
    probabilities, labels = random_predictions(seed=5)
    predicted = probabilities.argmax(1)
    report = single_label_report(
        probabilities, labels, NAMES, describe=lambda index: {"text": f"text {index}"}
    )
    assert report["kappa"] == pytest.approx(metrics.cohen_kappa_score(labels, predicted))
    assert report["log_loss"] == pytest.approx(metrics.log_loss(labels, probabilities))
    assert report["f1_weighted"] == pytest.approx(metrics.f1_score(labels, predicted, average="weighted"))
    assert report["roc_auc_macro"] == pytest.approx(
        metrics.roc_auc_score(labels, probabilities, multi_class="ovr")
    )
    assert report["confusion"] == metrics.confusion_matrix(labels, predicted).tolist()
    theirs = metrics.classification_report(labels, predicted, target_names=NAMES, output_dict=True)
    for name in NAMES:
        assert report["per_class"][name]["precision"] == pytest.approx(theirs[name]["precision"])
        assert report["per_class"][name]["recall"] == pytest.approx(theirs[name]["recall"])
        assert report["per_class"][name]["support"] == theirs[name]["support"]
    brier = sum(metrics.brier_score_loss(labels == c, probabilities[:, c]) for c in range(4))
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


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1], [2]])  # some classes have no text
def test_random_baseline_is_the_mean_over_all_guesses(labels):
    labels = np.array(labels)
    guesses = itertools.product(range(3), repeat=len(labels))
    all_metrics = [confusion_metrics(confusion_matrix(labels, np.array(guess), 3)) for guess in guesses]
    report = single_label_report(np.full((len(labels), 3), 1 / 3), labels, ["a", "b", "c"])
    results = report["baselines"]["random"]
    assert results["accuracy"] == results["balanced_accuracy"] == 1 / 3
    for name, value in results.items():
        assert value == pytest.approx(np.mean([each[name] for each in all_metrics]), abs=0.03), name


def test_multi_label_random_baseline_is_the_mean_over_all_guesses():
    labels = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]])
    guesses = itertools.product((False, True), repeat=labels.size)
    all_metrics = [
        multi_label_metrics(labels == 1, np.array(guess).reshape(labels.shape)) for guess in guesses
    ]
    report = multi_label_report(np.full(labels.shape, 0.5), labels, ["a", "b", "c"])
    results = report["baselines"]["random"]
    assert results["accuracy"] == 1 / 8
    for name, value in results.items():
        assert value == pytest.approx(np.mean([each[name] for each in all_metrics]), abs=0.03), name


def test_calibration_error():
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, True, True, False, True, False])
    bins, error = reliability(confidence, correct)
    assert error == pytest.approx(4 / 6 * 0.2 + 2 / 6 * 0.05)
    assert [each["count"] for each in bins] == [2, 4]
    perfect, none = reliability(np.array([1.0, 1.0]), np.array([True, True]))
    assert none == 0
    assert perfect[0]["count"] == 2


def test_intervals_equal_bootstrap_over_texts():
    probabilities, labels = random_predictions(count=300)
    report = single_label_report(probabilities, labels, NAMES, seed=3)
    rng = np.random.default_rng(7)
    predicted = probabilities.argmax(1)
    plain = []
    for _ in range(500):
        indices = rng.integers(300, size=300)
        plain.append(metrics.matthews_corrcoef(labels[indices], predicted[indices]))
    np.testing.assert_allclose(report["intervals"]["mcc"], np.percentile(plain, (2.5, 97.5)), atol=0.02)
    low, high = report["intervals"]["accuracy"]
    assert low < report["accuracy"] < high
    assert single_label_report(probabilities, labels, NAMES, seed=3)["intervals"] == report["intervals"]


def test_reports_of_single_class_or_text_are_finite():
    probabilities = np.array([[0.7, 0.2, 0.1]])
    report = single_label_report(probabilities, np.array([0]), ["a", "b", "c"])
    assert report["accuracy"] == 1
    assert report["roc_auc_macro"] is None
    json.dumps(report, allow_nan=False)
    json.dumps(multi_label_report(np.array([[0.7, 0.2]]), np.array([[0, 0]]), ["a", "b"]), allow_nan=False)


def test_multi_label_report():
    rng = np.random.default_rng(2)
    labels = rng.random((120, 3)) < 0.4
    probabilities = np.clip(labels * 0.4 + rng.random((120, 3)) * 0.6, 0, 1)
    report = multi_label_report(probabilities, labels.astype(float), ["x", "y", "z"])
    assert report["f1_samples"] == pytest.approx(
        metrics.f1_score(labels, probabilities > 0.5, average="samples", zero_division=1)
    )
    assert report["hamming"] == pytest.approx(metrics.hamming_loss(labels, probabilities > 0.5))
    assert report["per_class"]["y"]["mcc"] == pytest.approx(
        metrics.matthews_corrcoef(labels[:, 1], probabilities[:, 1] > 0.5)
    )
    clipped = probabilities.clip(1e-15, 1 - 1e-15)
    assert report["log_loss"] == pytest.approx(
        np.mean([metrics.log_loss(labels[:, c], clipped[:, c]) for c in range(3)])
    )
    low, high = report["intervals"]["accuracy"]
    assert low <= report["accuracy"] <= high


def test_soft_labels_are_scored_directly_and_counted_above_one_half():
    rng = np.random.default_rng(3)
    targets, probabilities = rng.random((80, 3)), rng.random((80, 3))
    targets[0, 0] = 0.5  # not above
    report = multi_label_report(probabilities, targets, ["x", "y", "z"])
    t, p = torch.from_numpy(targets), torch.from_numpy(probabilities)
    assert report["log_loss"] == pytest.approx(F.binary_cross_entropy(p, t).item(), rel=1e-12)
    assert report["brier"] == pytest.approx(F.mse_loss(p, t).item(), rel=1e-12)
    hard = multi_label_report(probabilities, targets > 0.5, ["x", "y", "z"])
    scored = {"log_loss", "brier"}
    assert {k: v for k, v in report.items() if k not in scored} == {
        k: v for k, v in hard.items() if k not in scored
    }


def test_multi_label_report_of_one_class(tmp_path):
    labels = np.array([[1], [1], [0], [0], [0]], dtype=bool)
    probabilities = np.array([[0.9], [0.2], [0.7], [0.1], [0.3]])
    report = multi_label_report(probabilities, labels, ["x"])
    assert report["per_class"]["x"]["confusion"] == [[2, 1], [1, 1]]
    assert {name: report["per_class"]["x"][name] for name in ("precision", "recall", "f1", "support")} == {
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "support": 2,
    }
    padded, guessed = (np.pad(each, ((0, 0), (0, 1))) for each in (labels, probabilities > 0.5))
    for average, zero_division in (("weighted", 0), ("samples", 1)):
        theirs = metrics.f1_score(padded, guessed, average=average, zero_division=zero_division)
        assert report[f"f1_{average}"] == pytest.approx(theirs)
    assert report["hamming"] == pytest.approx(2 / 5)
    json.dumps(report, allow_nan=False)
    write_classifier_plots(report, tmp_path / "plots.png")
    report["throughput"] = {"examples_per_s": 10.0, "tokens_per_s": 100.0, "seconds": 20.0}
    assert "0.500" in classification_text(report)


@pytest.mark.parametrize("seed", range(3))
def test_multi_label_classes_equal_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    labels, probabilities = rng.random((50, 4)) < [0.5, 0.2, 0, 1], rng.random((50, 4)) * [1, 1, 1, 0.5]
    report = multi_label_report(probabilities, labels, NAMES)
    theirs = metrics.precision_recall_fscore_support(labels, probabilities > 0.5, zero_division=0)
    tables = metrics.multilabel_confusion_matrix(labels, probabilities > 0.5)
    for index, name in enumerate(NAMES):
        ours = report["per_class"][name]
        results = [ours[key] for key in ("precision", "recall", "f1", "support")]
        np.testing.assert_allclose(results, [column[index] for column in theirs])
        assert ours["confusion"] == tables[index].tolist()
    weighted = metrics.f1_score(labels, probabilities > 0.5, average="weighted", zero_division=0)
    assert report["f1_weighted"] == pytest.approx(weighted)


def test_intervals_of_many_classes_need_no_matrix_per_sample():
    matrix = np.diag(np.ones(2000, dtype=int))
    matrix[0, 1] = 500
    tracemalloc.start()
    results = _intervals(matrix, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * matrix.nbytes
    low, high = results["accuracy"]
    assert low < 0.8 < high


def test_report_text_and_plot(tmp_path):
    probabilities, labels = random_predictions()
    for report in (
        single_label_report(probabilities, labels, NAMES, describe=lambda index: {"text": "x" * 100}),
        multi_label_report(probabilities, np.eye(4)[labels], NAMES),
    ):
        report["throughput"] = {"examples_per_s": 10.0, "tokens_per_s": 100.0, "seconds": 20.0}
        text = classification_text(report)
        assert f"{report['f1_macro']:.3f}" in text
        assert "majority" in text
        path = write_classifier_plots(report, tmp_path / "plots.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert write_classifier_plots(report, path) == path  # overwrites the existing file


def test_probe_fits_linear_boundaries_only():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5))
    straight, crossed = (x[:, 0] > 0).astype(int), ((x[:, 0] > 0) ^ (x[:, 1] > 0)).astype(int)
    assert (LinearProbe().fit(x[:200], straight[:200]).predict(x[200:]) == straight[200:]).mean() > 0.9
    assert (LinearProbe().fit(x[:200], crossed[:200]).predict(x[200:]) == crossed[200:]).mean() < 0.75
    both = np.stack([straight, crossed, np.ones(300, dtype=int)], axis=1)
    assert LinearProbe().fit(x[:200], both[:200]).predict(x[200:]).shape == (100, 3)
