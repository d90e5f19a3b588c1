"""Classification metrics from confusion matrices, in NumPy: fast enough for every evaluation of a run."""

import numpy as np


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the counts [classes, classes] of each true class (rows) and predicted class (columns)."""
    counts = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)


def confusion_metrics(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Return accuracy, balanced_accuracy, f1_macro and mcc of matrices [..., K, K], as in scikit-learn."""
    return metrics_from_counts(np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(-1), matrix.sum(-2))


def metrics_from_counts(
    correct: np.ndarray, true: np.ndarray, predicted: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the metrics of `confusion_metrics` from counts [..., K].

    Args:
        correct: Correct predictions of each class, the diagonal of the matrix.
        true: Texts of each class, the sums of its rows.
        predicted: Predictions of each class, the sums of its columns.
    """
    correct, true, predicted = (np.asarray(counts, dtype=np.float64) for counts in (correct, true, predicted))
    total = true.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = correct / true  # NaN for a class without texts
        f1 = 2 * correct / (true + predicted)
        covariance = correct.sum(-1) * total - (true * predicted).sum(-1)
        spread = np.sqrt((total**2 - (predicted**2).sum(-1)) * (total**2 - (true**2).sum(-1)))
        mcc = np.where(spread > 0, covariance / spread, 0.0)
    return {
        "accuracy": correct.sum(-1) / total,
        "balanced_accuracy": np.nanmean(recall, axis=-1),
        "f1_macro": np.nanmean(f1, axis=-1),
        "mcc": mcc,
    }


def multi_label_metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return subset accuracy, f1_macro and f1_micro of multi-label targets [texts, classes].

    The F1 of a class that is neither true nor predicted is 0.
    """
    correct = (labels & predicted).sum(0)
    sizes = labels.sum(0) + predicted.sum(0)
    f1 = np.where(sizes > 0, 2 * correct / np.maximum(sizes, 1), 0.0)
    return {
        "accuracy": float((labels == predicted).all(1).mean()),
        "f1_macro": float(f1.mean()),
        "f1_micro": float(2 * correct.sum() / max(1, sizes.sum())),
    }
