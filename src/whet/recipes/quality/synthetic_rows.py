"""Synthetic rows of the quality-decision task, and of a linear regression with known weights.

The structure is the published one. The unpublished parameters (how often a neighboring category is active,
the size of the bias, the matrices) are whet's. NumPy guarantees the random stream of RandomState, so the rows
are the same on every machine.
"""

from typing import Any

import numpy as np

CATEGORIES = (9, 11, 14, 7, 5, 16, 8, 4)  # number of choices per category, 74 in total
NUMERICALS = 22
OUTCOMES, AUX = 12, 8
INPUTS = sum(CATEGORIES) + NUMERICALS
OUTPUTS = OUTCOMES + AUX

_LATENT, _EXPERTS = 8, 4
_NEIGHBOR_PROBABILITY, _NEIGHBOR_VALUE = 0.3, 0.7
_BIAS = 0.05  # largest common shift of all numeric features of a row
_NOISE = 0.01  # standard deviation of the regression's noise
_SEEDS = {"world": 5, "train": 101, "valid": 202}

Records = list[dict[str, Any]]  # Any: JSON values


def quality(split: str, n: int, seed: int | None = None) -> Records:
    """Return the first n rows of a split: soft one-hot categories and numeric features, with their targets.

    Args:
        split: "train" or "valid".
        n: The number of rows.
        seed: Draws other rows of the same task; the targets of a given row do not depend on it.
    """
    random = _random_state(_SEEDS[split], seed)
    columns = 3 * len(CATEGORIES) + NUMERICALS + 1
    drawn = random.random_sample((n, columns))  # one row after the other: a smaller n gives a prefix
    picks, rest = drawn[:, : 3 * len(CATEGORIES)].reshape(n, -1, 3), drawn[:, 3 * len(CATEGORIES) :]
    blocks = [_soft_one_hot(picks[:, i], size) for i, size in enumerate(CATEGORIES)]
    bias = (2 * rest[:, -1:] - 1) * _BIAS
    numericals = np.clip(rest[:, :NUMERICALS] + bias, 0, 1)
    features = np.concatenate([*blocks, numericals], axis=1)
    return _records(features, _TargetFunction().labels(features))


def _soft_one_hot(drawn: np.ndarray, size: int) -> np.ndarray:
    """Return a block [rows, size] with 1 at the choice, and sometimes 0.7 at a neighbor.

    Args:
        drawn: Uniform values [rows, 3]: the choice, whether a neighbor is active, and on which side.
        size: The number of choices.
    """
    rows, choices = np.arange(len(drawn)), (drawn[:, 0] * size).astype(int)
    block = np.zeros((len(drawn), size))
    side = np.where(drawn[:, 2] < 0.5, -1, 1)
    side = np.where((choices + side < 0) | (choices + side >= size), -side, side)
    has_neighbor = drawn[:, 1] < _NEIGHBOR_PROBABILITY
    block[rows[has_neighbor], (choices + side)[has_neighbor]] = _NEIGHBOR_VALUE
    block[rows, choices] = 1.0
    return block


class _TargetFunction:
    """The fixed mixture of experts that computes the targets."""

    def __init__(self) -> None:
        random = np.random.RandomState(_SEEDS["world"])
        self.projection = random.standard_normal((INPUTS, _LATENT)) / 2
        self.router = random.standard_normal((_EXPERTS, _LATENT))
        self.outcome = random.standard_normal((_EXPERTS, OUTCOMES, _LATENT))
        self.outcome_bias = random.standard_normal((_EXPERTS, OUTCOMES))
        self.aux = random.standard_normal((_EXPERTS, AUX, _LATENT))
        self.aux_bias = random.standard_normal((_EXPERTS, AUX))
        means = [np.full(size, 1 / size) for size in CATEGORIES]
        self.feature_means = np.concatenate([*means, np.full(NUMERICALS, 0.5)])

    def labels(self, features: np.ndarray) -> np.ndarray:
        """Return the targets of rows: 12 outcome probabilities, then 8 values from 0 to 1."""
        latent = (features - self.feature_means) @ self.projection
        expert = self.expert(latent)
        scores = np.einsum("nod,nd->no", self.outcome[expert], latent) + self.outcome_bias[expert]
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        aux_logits = np.einsum("nod,nd->no", self.aux[expert], latent) + self.aux_bias[expert]
        aux = np.clip(1 / (1 + np.exp(-aux_logits)), 0, 1)
        return np.concatenate([exponentials / exponentials.sum(1, keepdims=True), aux], axis=1)

    def expert(self, latent: np.ndarray) -> np.ndarray:
        """Return the index of the expert that computes each row's targets."""
        indices: np.ndarray = (latent @ self.router.T).argmax(1)
        return indices


def regression(split: str, n: int, seed: int | None = None) -> Records:
    """Return the first n rows of y = x w + noise, with x uniform in -0.5 .. 0.5.

    Args:
        split: "train" or "valid".
        n: The number of rows.
        seed: Draws other rows; the weights w are always `regression_weights`.
    """
    features = _random_state(_SEEDS[split], seed).random_sample((n, INPUTS)) - 0.5
    noise = _random_state(_SEEDS[split] + 1, seed).standard_normal((n, OUTPUTS)) * _NOISE
    return _records(features, features @ regression_weights() + noise)


def _random_state(stream: int, seed: int | None) -> np.random.RandomState:
    """Return a random generator for a stream number and, optionally, a 64-bit seed."""
    if seed is None:
        return np.random.RandomState(stream)
    return np.random.RandomState([stream, seed & 0xFFFFFFFF, seed >> 32])


def regression_weights() -> np.ndarray:
    """Return the weights [INPUTS, OUTPUTS] of the targets of `regression`."""
    weights = np.random.RandomState(_SEEDS["world"]).standard_normal((INPUTS, OUTPUTS))
    return np.asarray(weights / np.sqrt(INPUTS))


def _records(features: np.ndarray, targets: np.ndarray) -> Records:
    """Return rows as records, rounded because the last bits of a matmul depend on the machine."""
    pairs = zip(features.round(9).tolist(), targets.round(9).tolist(), strict=True)
    return [{"features": row, "target": target} for row, target in pairs]
