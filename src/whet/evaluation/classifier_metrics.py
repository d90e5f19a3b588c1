"""The metrics of a classification report: scikit-learn's metrics, confidence intervals and baselines."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.errors import ConfigError
from whet.objectives.confusion_matrix import (
    confusion_matrix,
    confusion_metrics,
    metrics_from_counts,
    multi_label_metrics,
)

Report = dict[str, Any]  # Any: JSON values

BINS = 10  # of the reliability diagram
RESAMPLES = 1000  # of the bootstrap, and of the random baseline
CONFIDENCE = 0.95  # level of the confidence intervals
PAIRS_SHOWN = 5  # most confused pairs of classes
EXAMPLES_SHOWN = 3  # per confused pair
CURVE_POINTS = 100


def _metrics() -> Any:  # Any: scikit-learn has no types
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ConfigError(
            "the classification report needs scikit-learn", hint='pip install "whet[classify]"'
        ) from error
    return metrics


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of mutually exclusive classes in float64; logits: [texts, classes]."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    exponentials = np.exp(shifted)
    probabilities: np.ndarray = exponentials / exponentials.sum(1, keepdims=True)
    return probabilities


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of independent classes (multi-label) in float64."""
    probabilities: np.ndarray = 1 / (1 + np.exp(-logits.astype(np.float64)))
    return probabilities


def single_label_report(
    probabilities: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    *,
    seed: int = 0,
    describe: Callable[[int], dict[str, str]] = lambda _: {},
) -> Report:
    """Return the report of a classifier with one class per text.

    Args:
        probabilities: [texts, classes].
        labels: the correct classes, [texts].
        names: the names of the classes.
        seed: of the bootstrap and the random baseline.
        describe: returns fields that describe the text with the given index, for the examples of mistakes.
    """
    metrics, classes = _metrics(), len(names)
    predicted = probabilities.argmax(1)
    matrix = confusion_matrix(labels, predicted, classes)
    indices = range(classes)
    confidence, correct = probabilities.max(1), predicted == labels
    one_hot = np.eye(classes)[labels]
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        labels, predicted, labels=list(indices), zero_division=0
    )
    areas = [_areas(metrics, one_hot[:, i], probabilities[:, i]) for i in indices]
    bins, ece = reliability(confidence, correct)
    return {
        "examples": len(labels),
        "classes": list(names),
        "multi_label": False,
        **{name: float(value) for name, value in confusion_metrics(matrix).items()},
        "f1_micro": float(metrics.f1_score(labels, predicted, average="micro", zero_division=0)),
        "f1_weighted": float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0)),
        "kappa": _kappa(matrix),
        "log_loss": float(metrics.log_loss(labels, probabilities, labels=list(indices)))
        if classes > 1
        else 0.0,
        "brier": float(((probabilities - one_hot) ** 2).sum(1).mean()),
        "ece": ece,
        "confidence": {
            "all": _mean(confidence),
            "right": _mean(confidence[correct]),
            "wrong": _mean(confidence[~correct]),
        },
        "roc_auc_macro": _mean_of_known([area["roc_auc"] for area in areas]),
        "pr_auc_macro": _mean_of_known([area["pr_auc"] for area in areas]),
        "intervals": _intervals(matrix, seed=seed),
        "per_class": {
            name: {
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
                "support": int(support[i]),
                **areas[i],
            }
            for i, name in enumerate(names)
        },
        "confusion": matrix.tolist(),
        "reliability": bins,
        "curves": {
            name: _curves(metrics, one_hot[:, i], probabilities[:, i]) for i, name in enumerate(names)
        },
        "baselines": _baselines(labels, classes, seed=seed),
        "confused": _confused_pairs(matrix, labels, predicted, probabilities, names, describe),
    }


def multi_label_report(
    probabilities: np.ndarray, targets: np.ndarray, names: Sequence[str], *, seed: int = 0
) -> Report:
    """Return the report of a multi-label classifier.

    Log loss and Brier score use soft targets directly. All other metrics use labels: a text has the classes
    whose target is above 0.5, and the classes whose probability is above 0.5 are predicted.

    Args:
        probabilities: [texts, classes].
        targets: between 0 and 1, [texts, classes].
        names: the names of the classes.
        seed: of the bootstrap and the random baseline.
    """
    metrics = _metrics()
    labels, predicted = targets > 0.5, probabilities > 0.5
    # not scikit-learn's function, which treats the labels of a single class as two classes
    both, support, positives = (labels & predicted).sum(0), labels.sum(0), predicted.sum(0)
    neither = len(labels) - support - positives + both
    tables = np.stack([neither, positives - both, support - both, both], axis=1).reshape(-1, 2, 2)
    precision, recall = both / np.maximum(positives, 1), both / np.maximum(support, 1)
    f1 = 2 * both / np.maximum(support + positives, 1)
    sizes = labels.sum(1) + predicted.sum(1)  # labels plus predictions of each text
    overlaps = np.where(sizes > 0, 2 * (labels & predicted).sum(1) / np.maximum(sizes, 1), 1.0)
    areas = [_areas(metrics, labels[:, i], probabilities[:, i]) for i in range(len(names))]
    confidence = np.maximum(probabilities, 1 - probabilities)
    bins, ece = reliability(confidence.ravel(), (predicted == labels).ravel())
    clipped = probabilities.clip(1e-15, 1 - 1e-15)
    is_frequent = labels.mean(0) > 0.5
    return {
        "examples": len(labels),
        "classes": list(names),
        "multi_label": True,
        **multi_label_metrics(labels, predicted),
        "f1_weighted": float(f1 @ support / max(1, support.sum())),
        "f1_samples": float(overlaps.mean()),
        "hamming": float((labels != predicted).mean()),
        "log_loss": float(-(targets * np.log(clipped) + (1 - targets) * np.log(1 - clipped)).mean()),
        "brier": float(((probabilities - targets) ** 2).mean()),
        "ece": ece,
        "roc_auc_macro": _mean_of_known([area["roc_auc"] for area in areas]),
        "pr_auc_macro": _mean_of_known([area["pr_auc"] for area in areas]),
        "intervals": _multi_label_intervals(labels, predicted, seed=seed),
        "per_class": {
            name: {
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
                "support": int(support[i]),
                "mcc": float(confusion_metrics(tables[i])["mcc"]),
                "confusion": tables[i].tolist(),
                **areas[i],
            }
            for i, name in enumerate(names)
        },
        "reliability": bins,
        "curves": {name: _curves(metrics, labels[:, i], probabilities[:, i]) for i, name in enumerate(names)},
        "baselines": {
            "majority": multi_label_metrics(labels, np.broadcast_to(is_frequent, labels.shape)),
            "random": _random_label_metrics(labels, seed=seed),
        },
    }


def reliability(confidence: np.ndarray, correct: np.ndarray) -> tuple[list[dict[str, float]], float]:
    """Return the accuracy per confidence bin of equal width, and the expected calibration error.

    Args:
        confidence: the probability of each prediction, [predictions].
        correct: whether each prediction is correct, [predictions].
    """
    bin_indices = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for i in range(BINS):
        inside = bin_indices == i
        count = int(inside.sum())
        if count:
            mean_confidence, accuracy = float(confidence[inside].mean()), float(correct[inside].mean())
            error += count / len(confidence) * abs(mean_confidence - accuracy)
            bins.append(
                {"from": i / BINS, "count": count, "confidence": mean_confidence, "accuracy": accuracy}
            )
    return bins, error


def _areas(
    metrics: Any, labels: np.ndarray, probabilities: np.ndarray
) -> dict[str, float | None]:  # Any: as above
    """Return the areas under the ROC and precision-recall curves, or None if all labels are equal."""
    if not 0 < labels.sum() < len(labels):
        return {"roc_auc": None, "pr_auc": None}
    return {
        "roc_auc": float(metrics.roc_auc_score(labels, probabilities)),
        "pr_auc": float(metrics.average_precision_score(labels, probabilities)),
    }


def _curves(
    metrics: Any, labels: np.ndarray, probabilities: np.ndarray
) -> dict[str, Any]:  # Any: as above, JSON
    if not 0 < labels.sum() < len(labels):
        return {}
    false_positives, true_positives, _ = metrics.roc_curve(labels, probabilities)
    precision, recall, _ = metrics.precision_recall_curve(labels, probabilities)
    return {
        "roc": [_downsample(false_positives), _downsample(true_positives)],
        "pr": [_downsample(recall), _downsample(precision)],
    }


def _downsample(values: np.ndarray) -> list[float]:
    indices = np.unique(np.linspace(0, len(values) - 1, CURVE_POINTS).round().astype(int))
    return [round(float(value), 4) for value in values[indices]]


def _kappa(matrix: np.ndarray) -> float:
    """Return Cohen's kappa, with 0 if the expected agreement is 1 (scikit-learn returns NaN)."""
    fractions = matrix / matrix.sum()
    expected = float(fractions.sum(0) @ fractions.sum(1))
    return float((np.trace(fractions) - expected) / (1 - expected)) if expected < 1 else 0.0


def _intervals(matrix: np.ndarray, *, seed: int) -> dict[str, list[float]]:
    """Return bootstrap percentiles; texts are resampled as counts of the nonzero cells of the matrix."""
    rng, total, classes = np.random.default_rng(seed), int(matrix.sum()), len(matrix)
    labels, predicted = np.nonzero(matrix)
    fractions, correct = matrix[labels, predicted] / total, labels == predicted
    samples = []
    for _ in range(RESAMPLES):
        cells = rng.multinomial(total, fractions)
        support, positives, hits = (
            np.bincount(indices, counts, minlength=classes)
            for indices, counts in ((labels, cells), (predicted, cells), (labels[correct], cells[correct]))
        )
        samples.append(metrics_from_counts(hits, support, positives))
    return {
        name: _percentiles(np.array([sample[name] for sample in samples]))
        for name in ("accuracy", "f1_macro", "mcc")
    }


def _multi_label_intervals(labels: np.ndarray, predicted: np.ndarray, *, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    resamples = [rng.integers(len(labels), size=len(labels)) for _ in range(RESAMPLES)]
    samples = [multi_label_metrics(labels[indices], predicted[indices]) for indices in resamples]
    return {name: _percentiles(np.array([sample[name] for sample in samples])) for name in samples[0]}


def _percentiles(values: np.ndarray) -> list[float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    return [float(value) for value in np.percentile(values, (tail, 100 - tail))]


def _baselines(labels: np.ndarray, classes: int, *, seed: int) -> dict[str, dict[str, float]]:
    """Return the metrics of always predicting the most frequent class, and of uniformly random classes."""
    most_frequent = np.full(len(labels), np.bincount(labels).argmax())
    majority = confusion_metrics(confusion_matrix(labels, most_frequent, classes))
    return {
        "majority": {metric: float(value) for metric, value in majority.items()},
        "random": _random_class_metrics(labels, classes, seed=seed),
    }


def _random_class_metrics(labels: np.ndarray, classes: int, *, seed: int) -> dict[str, float]:
    """Return the expected metrics of uniformly random classes; F1 is a mean over sampled class counts."""
    support, total = np.bincount(labels, minlength=classes), len(labels)
    positives = np.random.default_rng(seed).multinomial(total, np.full(classes, 1 / classes), size=RESAMPLES)
    f1 = metrics_from_counts(support * positives / total, support, positives)["f1_macro"]
    return {
        "accuracy": 1 / classes,
        "balanced_accuracy": 1 / classes,
        "f1_macro": float(f1.mean()),
        "mcc": 0.0,
    }


def _random_label_metrics(labels: np.ndarray, *, seed: int) -> dict[str, float]:
    """Return the expected metrics of predicting each class of each text with probability 0.5."""
    total, classes = labels.shape
    support, rng = labels.sum(0), np.random.default_rng(seed)
    positives = rng.binomial(total, 0.5, size=(RESAMPLES, classes))
    both, sizes = support * positives / total, support + positives
    return {
        "accuracy": 0.5**classes,
        "f1_macro": float((2 * both / np.maximum(sizes, 1)).mean()),
        "f1_micro": float((2 * both.sum(1) / np.maximum(sizes.sum(1), 1)).mean()),
    }


def _confused_pairs(
    matrix: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
    probabilities: np.ndarray,
    names: Sequence[str],
    show: Callable[[int], dict[str, str]],
) -> list[Report]:
    """Return the most confused pairs of classes, with the texts whose mistake was the most confident."""
    mistakes = matrix - np.diag(np.diagonal(matrix))
    pairs = []
    for cell in np.argsort(-mistakes.ravel(), kind="stable")[:PAIRS_SHOWN]:
        label, prediction = divmod(int(cell), len(names))
        if not mistakes[label, prediction]:
            break
        texts = np.flatnonzero((labels == label) & (predicted == prediction))
        by_confidence = texts[np.argsort(-probabilities[texts, prediction], kind="stable")]
        pairs.append(
            {
                "label": names[label],
                "predicted": names[prediction],
                "count": int(mistakes[label, prediction]),
                "examples": [
                    {**show(int(text)), "probability": float(probabilities[text, prediction])}
                    for text in by_confidence[:EXAMPLES_SHOWN]
                ],
            }
        )
    return pairs


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
