"""Everything a report says of a classifier's predictions: scikit-learn's metrics, intervals and baselines."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.errors import ConfigError
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, count_metrics, mark_metrics

Report = dict[str, Any]  # Any: JSON values

BINS = 10  # of the reliability diagram
RESAMPLES = 1000  # of the bootstrap, and guesses that a mean is taken over
CONFIDENCE = 0.95
PAIRS_SHOWN = 5
EXAMPLES_SHOWN = 3
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
    """Probabilities of classes that exclude each other, in float64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    powers = np.exp(shifted)
    found: np.ndarray = powers / powers.sum(1, keepdims=True)
    return found


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities of classes that do not, in float64."""
    found: np.ndarray = 1 / (1 + np.exp(-logits.astype(np.float64)))
    return found


def single_report(
    chances: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    *,
    seed: int = 0,
    show: Callable[[int], dict[str, str]] = lambda _: {},
) -> Report:
    """Of probabilities [texts, classes] and the right classes [texts]; `show` tells of one text."""
    metrics, classes = _metrics(), len(names)
    predicted = chances.argmax(1)
    matrix = confusion_matrix(labels, predicted, classes)
    numbers = range(classes)
    sure, right = chances.max(1), predicted == labels
    hits = np.eye(classes)[labels]
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        labels, predicted, labels=list(numbers), zero_division=0
    )
    areas = [_areas(metrics, hits[:, number], chances[:, number]) for number in numbers]
    bins, ece = reliability(sure, right)
    return {
        "examples": len(labels),
        "classes": list(names),
        "multi_label": False,
        **{name: float(value) for name, value in confusion_metrics(matrix).items()},
        "f1_micro": float(metrics.f1_score(labels, predicted, average="micro", zero_division=0)),
        "f1_weighted": float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0)),
        "kappa": _kappa(matrix),
        "log_loss": float(metrics.log_loss(labels, chances, labels=list(numbers))) if classes > 1 else 0.0,
        "brier": float(((chances - hits) ** 2).sum(1).mean()),
        "ece": ece,
        "confidence": {"all": _mean(sure), "right": _mean(sure[right]), "wrong": _mean(sure[~right])},
        "roc_auc_macro": _mean_of([area["roc_auc"] for area in areas]),
        "pr_auc_macro": _mean_of([area["pr_auc"] for area in areas]),
        "intervals": _intervals(matrix, seed=seed),
        "per_class": {
            name: {
                "precision": float(precision[number]),
                "recall": float(recall[number]),
                "f1": float(f1[number]),
                "support": int(support[number]),
                **areas[number],
            }
            for number, name in enumerate(names)
        },
        "confusion": matrix.tolist(),
        "reliability": bins,
        "curves": {name: _curves(metrics, hits[:, n], chances[:, n]) for n, name in enumerate(names)},
        "baselines": _baselines(labels, classes, seed=seed),
        "confused": _confused(matrix, labels, predicted, chances, names, show),
    }


def marked_report(chances: np.ndarray, targets: np.ndarray, names: Sequence[str], *, seed: int = 0) -> Report:
    """Of probabilities and targets [texts, classes], where a text may have several classes.

    Log loss and Brier score compare the two as they are. All else counts classes: a text has those whose
    target is above one half, and is predicted to have those whose probability is.
    """
    metrics = _metrics()
    marks, predicted = targets > 0.5, chances > 0.5
    # not scikit-learn's: it reads the marks of a single class as the numbers of two
    both, support, guessed = (marks & predicted).sum(0), marks.sum(0), predicted.sum(0)
    neither = len(marks) - support - guessed + both
    tables = np.stack([neither, guessed - both, support - both, both], axis=1).reshape(-1, 2, 2)
    precision, recall = both / np.maximum(guessed, 1), both / np.maximum(support, 1)
    f1 = 2 * both / np.maximum(support + guessed, 1)
    sizes = marks.sum(1) + predicted.sum(1)  # of the two sets of a text
    overlaps = np.where(sizes > 0, 2 * (marks & predicted).sum(1) / np.maximum(sizes, 1), 1.0)
    areas = [_areas(metrics, marks[:, n], chances[:, n]) for n in range(len(names))]
    sure = np.maximum(chances, 1 - chances)
    bins, ece = reliability(sure.ravel(), (predicted == marks).ravel())
    clipped = chances.clip(1e-15, 1 - 1e-15)
    usual = marks.mean(0) > 0.5
    return {
        "examples": len(marks),
        "classes": list(names),
        "multi_label": True,
        **mark_metrics(marks, predicted),
        "f1_weighted": float(f1 @ support / max(1, support.sum())),
        "f1_samples": float(overlaps.mean()),
        "hamming": float((marks != predicted).mean()),
        "log_loss": float(-(targets * np.log(clipped) + (1 - targets) * np.log(1 - clipped)).mean()),
        "brier": float(((chances - targets) ** 2).mean()),
        "ece": ece,
        "roc_auc_macro": _mean_of([area["roc_auc"] for area in areas]),
        "pr_auc_macro": _mean_of([area["pr_auc"] for area in areas]),
        "intervals": _mark_intervals(marks, predicted, seed=seed),
        "per_class": {
            name: {
                "precision": float(precision[n]),
                "recall": float(recall[n]),
                "f1": float(f1[n]),
                "support": int(support[n]),
                "mcc": float(confusion_metrics(tables[n])["mcc"]),
                "confusion": tables[n].tolist(),
                **areas[n],
            }
            for n, name in enumerate(names)
        },
        "reliability": bins,
        "curves": {name: _curves(metrics, marks[:, n], chances[:, n]) for n, name in enumerate(names)},
        "baselines": {
            "majority": mark_metrics(marks, np.broadcast_to(usual, marks.shape)),
            "random": _guessed_marks(marks, seed=seed),
        },
    }


def reliability(sure: np.ndarray, right: np.ndarray) -> tuple[list[dict[str, float]], float]:
    """How often each confidence is right, in bins of equal width, and the expected calibration error."""
    which = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in range(BINS):
        inside = which == number
        count = int(inside.sum())
        if count:
            said, held = float(sure[inside].mean()), float(right[inside].mean())
            error += count / len(sure) * abs(said - held)
            bins.append({"from": number / BINS, "count": count, "confidence": said, "accuracy": held})
    return bins, error


def _areas(metrics: Any, hits: np.ndarray, chances: np.ndarray) -> dict[str, float | None]:  # Any: as above
    """Areas under both curves; None where a class has no text, or every one."""
    if not 0 < hits.sum() < len(hits):
        return {"roc_auc": None, "pr_auc": None}
    return {
        "roc_auc": float(metrics.roc_auc_score(hits, chances)),
        "pr_auc": float(metrics.average_precision_score(hits, chances)),
    }


def _curves(metrics: Any, hits: np.ndarray, chances: np.ndarray) -> dict[str, Any]:  # Any: as above, JSON
    if not 0 < hits.sum() < len(hits):
        return {}
    false, true, _ = metrics.roc_curve(hits, chances)
    precision, recall, _ = metrics.precision_recall_curve(hits, chances)
    return {"roc": [_thin(false), _thin(true)], "pr": [_thin(recall), _thin(precision)]}


def _thin(values: np.ndarray) -> list[float]:
    places = np.unique(np.linspace(0, len(values) - 1, CURVE_POINTS).round().astype(int))
    return [round(float(value), 4) for value in values[places]]


def _kappa(matrix: np.ndarray) -> float:
    """Cohen's; 0 where nothing but chance could be (scikit-learn's is NaN there)."""
    shares = matrix / matrix.sum()
    chance = float(shares.sum(0) @ shares.sum(1))
    return float((np.trace(shares) - chance) / (1 - chance)) if chance < 1 else 0.0


def _intervals(matrix: np.ndarray, *, seed: int) -> dict[str, list[float]]:
    """Bootstrap percentiles. Drawing texts anew is drawing the cells of the matrix that hold some anew."""
    rng, total, classes = np.random.default_rng(seed), int(matrix.sum()), len(matrix)
    labels, predicted = np.nonzero(matrix)
    shares, right = matrix[labels, predicted] / total, labels == predicted
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.multinomial(total, shares)
        true, guessed, hits = (
            np.bincount(places, counts, minlength=classes)
            for places, counts in ((labels, drawn), (predicted, drawn), (labels[right], drawn[right]))
        )
        found.append(count_metrics(hits, true, guessed))
    return {
        name: _percentiles(np.array([each[name] for each in found]))
        for name in ("accuracy", "f1_macro", "mcc")
    }


def _mark_intervals(marks: np.ndarray, predicted: np.ndarray, *, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(len(marks), size=len(marks)) for _ in range(RESAMPLES)]
    found = [mark_metrics(marks[places], predicted[places]) for places in drawn]
    return {name: _percentiles(np.array([each[name] for each in found])) for name in found[0]}


def _percentiles(values: np.ndarray) -> list[float]:
    edge = 100 * (1 - CONFIDENCE) / 2
    return [float(value) for value in np.percentile(values, (edge, 100 - edge))]


def _baselines(labels: np.ndarray, classes: int, *, seed: int) -> dict[str, dict[str, float]]:
    """Always the most frequent class, and what to expect where every class is as likely as any other."""
    largest = np.full(len(labels), np.bincount(labels).argmax())
    majority = confusion_metrics(confusion_matrix(labels, largest, classes))
    return {
        "majority": {metric: float(value) for metric, value in majority.items()},
        "random": _guessed_classes(labels, classes, seed=seed),
    }


def _guessed_classes(labels: np.ndarray, classes: int, *, seed: int) -> dict[str, float]:
    """What to expect of guesses; F1 is a mean over draws of how often each class is guessed."""
    true, total = np.bincount(labels, minlength=classes), len(labels)
    guessed = np.random.default_rng(seed).multinomial(total, np.full(classes, 1 / classes), size=RESAMPLES)
    f1 = count_metrics(true * guessed / total, true, guessed)["f1_macro"]
    return {
        "accuracy": 1 / classes,
        "balanced_accuracy": 1 / classes,
        "f1_macro": float(f1.mean()),
        "mcc": 0.0,
    }


def _guessed_marks(marks: np.ndarray, *, seed: int) -> dict[str, float]:
    """The same where a coin decides on each class of each text."""
    total, classes = marks.shape
    support, rng = marks.sum(0), np.random.default_rng(seed)
    guessed = rng.binomial(total, 0.5, size=(RESAMPLES, classes))
    both, sizes = support * guessed / total, support + guessed
    return {
        "accuracy": 0.5**classes,
        "f1_macro": float((2 * both / np.maximum(sizes, 1)).mean()),
        "f1_micro": float((2 * both.sum(1) / np.maximum(sizes.sum(1), 1)).mean()),
    }


def _confused(
    matrix: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
    chances: np.ndarray,
    names: Sequence[str],
    show: Callable[[int], dict[str, str]],
) -> list[Report]:
    """The pairs that are mixed up most, each with the texts whose mistake was the surest."""
    wrong = matrix - np.diag(np.diagonal(matrix))
    found = []
    for cell in np.argsort(-wrong.ravel(), kind="stable")[:PAIRS_SHOWN]:
        label, guess = divmod(int(cell), len(names))
        if not wrong[label, guess]:
            break
        places = np.flatnonzero((labels == label) & (predicted == guess))
        surest = places[np.argsort(-chances[places, guess], kind="stable")][:EXAMPLES_SHOWN]
        found.append(
            {
                "label": names[label],
                "predicted": names[guess],
                "count": int(wrong[label, guess]),
                "examples": [
                    {**show(int(place)), "probability": float(chances[place, guess])} for place in surest
                ],
            }
        )
    return found


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
