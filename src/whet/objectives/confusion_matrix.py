"""Numbers that a confusion matrix holds, by numpy alone: cheap enough for every evaluation of a run."""

import numpy as np


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """[classes, classes]: how many of each class (rows) were taken for each (columns)."""
    counts = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)


def confusion_metrics(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """accuracy, balanced_accuracy, f1_macro and mcc of matrices [..., K, K], as scikit-learn defines them."""
    return count_metrics(np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(-1), matrix.sum(-2))


def count_metrics(right: np.ndarray, true: np.ndarray, guessed: np.ndarray) -> dict[str, np.ndarray]:
    """The same of a matrix's diagonal, the sums of its rows and those of its columns, each [..., K]."""
    right, true, guessed = (np.asarray(counts, dtype=np.float64) for counts in (right, true, guessed))
    total = true.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = right / true  # NaN: a class that is not there
        f1 = 2 * right / (true + guessed)
        covariance = right.sum(-1) * total - (true * guessed).sum(-1)
        spread = np.sqrt((total**2 - (guessed**2).sum(-1)) * (total**2 - (true**2).sum(-1)))
        mcc = np.where(spread > 0, covariance / spread, 0.0)
    return {
        "accuracy": right.sum(-1) / total,
        "balanced_accuracy": np.nanmean(recall, axis=-1),
        "f1_macro": np.nanmean(f1, axis=-1),
        "mcc": mcc,
    }


def mark_metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """accuracy (of whole sets), f1_macro and f1_micro of marks [texts, classes]; a class never meant is 0."""
    both = (labels & predicted).sum(0)
    sizes = labels.sum(0) + predicted.sum(0)
    f1 = np.where(sizes > 0, 2 * both / np.maximum(sizes, 1), 0.0)
    return {
        "accuracy": float((labels == predicted).all(1).mean()),
        "f1_macro": float(f1.mean()),
        "f1_micro": float(2 * both.sum() / max(1, sizes.sum())),
    }
