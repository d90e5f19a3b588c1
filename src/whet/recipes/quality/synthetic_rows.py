"""Made-up rows of the quality-decision task, and of a linear one whose answer is known.

The shape is the published one; what was not published (how often a neighbour is lit, how large the bias is,
the matrices) is whet's own. RandomState's stream is frozen by NumPy, so the rows are the same everywhere.
"""

from typing import Any

import numpy as np

CATEGORIES = (9, 11, 14, 7, 5, 16, 8, 4)  # choices of each category: 74 in all
NUMERICALS = 22
OUTCOMES, AUX = 12, 8
INPUTS = sum(CATEGORIES) + NUMERICALS
OUTPUTS = OUTCOMES + AUX

_LATENT, _EXPERTS = 8, 4
_NEIGHBOUR_CHANCE, _NEIGHBOUR = 0.3, 0.7
_BIAS = 0.05  # largest shift of all numericals of a row
_NOISE = 0.01  # of the regression
_SEEDS = {"world": 5, "train": 101, "valid": 202}

Records = list[dict[str, Any]]  # Any: JSON values


def quality(split: str, n: int, seed: int | None = None) -> Records:
    """Return the first n rows of a split: soft one-hot categories and numericals, and the right answers.

    A `seed` draws other rows of the same task: what is right for a row does not depend on it.
    """
    draw = _random(_SEEDS[split], seed)
    columns = 3 * len(CATEGORIES) + NUMERICALS + 1
    drawn = draw.random_sample((n, columns))  # row by row, so that fewer rows are the first of more
    picks, rest = drawn[:, : 3 * len(CATEGORIES)].reshape(n, -1, 3), drawn[:, 3 * len(CATEGORIES) :]
    blocks = [_soft_one_hot(picks[:, place], size) for place, size in enumerate(CATEGORIES)]
    bias = (2 * rest[:, -1:] - 1) * _BIAS
    numericals = np.clip(rest[:, :NUMERICALS] + bias, 0, 1)
    features = np.concatenate([*blocks, numericals], axis=1)
    return _records(features, _World().labels(features))


def _soft_one_hot(drawn: np.ndarray, size: int) -> np.ndarray:
    """1 at the choice, and sometimes 0.7 beside it."""
    rows, chosen = np.arange(len(drawn)), (drawn[:, 0] * size).astype(int)
    block = np.zeros((len(drawn), size))
    side = np.where(drawn[:, 2] < 0.5, -1, 1)
    side = np.where((chosen + side < 0) | (chosen + side >= size), -side, side)
    lit = drawn[:, 1] < _NEIGHBOUR_CHANCE
    block[rows[lit], (chosen + side)[lit]] = _NEIGHBOUR
    block[rows, chosen] = 1.0
    return block


class _World:
    """The fixed matrices that say what is right."""

    def __init__(self) -> None:
        draw = np.random.RandomState(_SEEDS["world"])
        self.project = draw.standard_normal((INPUTS, _LATENT)) / 2
        self.route = draw.standard_normal((_EXPERTS, _LATENT))
        self.outcome = draw.standard_normal((_EXPERTS, OUTCOMES, _LATENT))
        self.outcome_bias = draw.standard_normal((_EXPERTS, OUTCOMES))
        self.aux = draw.standard_normal((_EXPERTS, AUX, _LATENT))
        self.aux_bias = draw.standard_normal((_EXPERTS, AUX))
        means = [np.full(size, 1 / size) for size in CATEGORIES]
        self.middle = np.concatenate([*means, np.full(NUMERICALS, 0.5)])

    def labels(self, features: np.ndarray) -> np.ndarray:
        """Twelve outcomes that sum to 1, then eight numbers from 0 to 1."""
        latent = (features - self.middle) @ self.project
        expert = self.expert(latent)
        scores = np.einsum("nod,nd->no", self.outcome[expert], latent) + self.outcome_bias[expert]
        raised = np.exp(scores - scores.max(1, keepdims=True))
        inner = np.einsum("nod,nd->no", self.aux[expert], latent) + self.aux_bias[expert]
        aux = np.clip(1 / (1 + np.exp(-inner)), 0, 1)
        return np.concatenate([raised / raised.sum(1, keepdims=True), aux], axis=1)

    def expert(self, latent: np.ndarray) -> np.ndarray:
        """Which of the four is right about a row."""
        found: np.ndarray = (latent @ self.route.T).argmax(1)
        return found


def regression(split: str, n: int, seed: int | None = None) -> Records:
    """Return the first n rows of y = x w + noise, x uniform in -0.5 .. 0.5; w is the same for every seed."""
    draw = _random(_SEEDS[split], seed)
    features = draw.random_sample((n, INPUTS)) - 0.5
    noise = _random(_SEEDS[split] + 1, seed).standard_normal((n, OUTPUTS)) * _NOISE
    return _records(features, features @ regression_weights() + noise)


def _random(stream: int, seed: int | None) -> np.random.RandomState:
    """Return the numbers of a stream; those of a seed (64 bits) are independent of those without one."""
    if seed is None:
        return np.random.RandomState(stream)
    return np.random.RandomState([stream, seed & 0xFFFFFFFF, seed >> 32])


def regression_weights() -> np.ndarray:
    """The w that `regression` is made with: [INPUTS, OUTPUTS]."""
    weights = np.random.RandomState(_SEEDS["world"]).standard_normal((INPUTS, OUTPUTS))
    return np.asarray(weights / np.sqrt(INPUTS))


def _records(features: np.ndarray, targets: np.ndarray) -> Records:
    """Rounded, because the last bits of a product or an exponential are not the same on every machine."""
    pairs = zip(features.round(9).tolist(), targets.round(9).tolist(), strict=True)
    return [{"features": row, "target": target} for row, target in pairs]
