"""A linear probe: what a straight line through frozen features can tell, the cheap rival of a fine-tuning."""

import numpy as np

from whet.errors import ConfigError


class LinearProbe:
    """Logistic regression on standardised features, with every class as heavy as any other."""

    def __init__(self, *, strength: float = 1.0, balanced: bool = True) -> None:
        try:
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise ConfigError(
                "a linear probe needs scikit-learn", hint='pip install "whet[classify]"'
            ) from error
        self._make = lambda: LogisticRegression(
            C=strength, max_iter=1000, class_weight="balanced" if balanced else None
        )

    def fit(self, features: np.ndarray, labels: np.ndarray) -> "LinearProbe":
        """Learn from features [texts, D] the classes [texts], or the marks [texts, classes]."""
        self.centre, self.spread = features.mean(0), features.std(0) + 1e-6
        scaled = self._scaled(features)
        self.multi_label = labels.ndim == 2
        columns = labels.T if self.multi_label else [labels]
        self.fitted = [
            self._make().fit(scaled, column) if len(np.unique(column)) > 1 else column[0]
            for column in columns
        ]
        return self

    def predict(self, features: np.ndarray) -> np.ndarray:
        """The classes [texts], or the marks [texts, classes]."""
        scaled = self._scaled(features)
        found = [
            model.predict(scaled) if hasattr(model, "predict") else np.full(len(scaled), model)
            for model in self.fitted
        ]
        return np.stack(found, axis=1) if self.multi_label else found[0]

    def accuracy(self, features: np.ndarray, labels: np.ndarray) -> float:
        """Share of classes, or of marks, that are predicted as they are."""
        return float((self.predict(features) == labels).mean())

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = (features - self.centre) / self.spread
        return scaled
