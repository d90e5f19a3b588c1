"""A linear probe on frozen features, a cheap baseline for fine-tuning."""

import numpy as np

from whet.errors import ConfigError


class LinearProbe:
    """Logistic regression on standardized features.

    Args:
        strength: the inverse of the L2 regularization (scikit-learn's `C`).
        balanced: whether classes have equal weight, whatever their frequency.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self, *, strength: float = 1.0, balanced: bool = True) -> None:
        try:
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise ConfigError(
                "a linear probe needs scikit-learn", hint='pip install "whet[classify]"'
            ) from error
        self._new_classifier = lambda: LogisticRegression(
            C=strength, max_iter=1000, class_weight="balanced" if balanced else None
        )

    def fit(self, features: np.ndarray, labels: np.ndarray) -> "LinearProbe":
        """Fit the probe and return it.

        Args:
            features: [texts, D].
            labels: classes [texts], or 0 and 1 [texts, classes] for multi-label data.
        """
        self._mean, self._std = features.mean(0), features.std(0) + 1e-6
        standardized = self._standardize(features)
        self.multi_label = labels.ndim == 2
        columns = labels.T if self.multi_label else [labels]
        # one classifier per column, or the label itself if a column has a single value
        self._classifiers = [
            self._new_classifier().fit(standardized, column) if len(np.unique(column)) > 1 else column[0]
            for column in columns
        ]
        return self

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return the predicted classes [texts], or 0 and 1 [texts, classes] for multi-label data."""
        standardized = self._standardize(features)
        columns = [
            each.predict(standardized) if hasattr(each, "predict") else np.full(len(standardized), each)
            for each in self._classifiers
        ]
        return np.stack(columns, axis=1) if self.multi_label else columns[0]

    def accuracy(self, features: np.ndarray, labels: np.ndarray) -> float:
        """Return the fraction of labels that are predicted correctly."""
        return float((self.predict(features) == labels).mean())

    def _standardize(self, features: np.ndarray) -> np.ndarray:
        standardized: np.ndarray = (features - self._mean) / self._std
        return standardized
