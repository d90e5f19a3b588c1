"""Classes in equal shares: records held out of each class alike, and rare classes repeated."""

import hashlib

import numpy as np

from whet.data.examples import StoredExamples
from whet.data.plan import permutation


def record_hashes(examples: StoredExamples) -> list[str]:
    """SHA-256 of each example's text, as its tokens."""
    return [
        hashlib.sha256(examples.store.read(int(start), int(stop))[0].tobytes()).hexdigest()
        for start, stop in zip(examples.starts, examples.stops, strict=True)
    ]


def label_values(examples: StoredExamples, count: int) -> np.ndarray:
    """[examples, count] the first numbers of each example: its class, or its targets."""
    found: np.ndarray = np.array(examples.store.values)[examples.records][:, :count]
    return found


def to_marks(targets: np.ndarray) -> np.ndarray:
    """Which classes a text has, as true and false: those whose target is above one half."""
    marks: np.ndarray = targets > 0.5
    return marks


def held_out(hashes: list[str], labels: np.ndarray, *, share: float, seed: int) -> np.ndarray:
    """[examples] which to hold out: of each class the share, at least one, and never all.

    Equal texts stay together, on one side, so that the sides are disjoint. What is alone in its class, or in
    its combination of classes, is judged together with all others that are.
    """
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(hashes):
        groups.setdefault(text, []).append(place)
    strata: dict[tuple[float, ...], list[str]] = {}
    for text, places in groups.items():
        strata.setdefault(tuple(labels[places[0]].tolist()), []).append(text)
    alone = [text for texts in strata.values() if len(texts) == 1 for text in texts]
    chosen = np.zeros(len(hashes), dtype=bool)
    for texts in [*(texts for texts in strata.values() if len(texts) > 1), alone]:
        ordered = sorted(texts)  # the order of the records does not matter
        count = min(max(1, round(share * len(ordered))), len(ordered) - 1)
        for place in permutation(len(ordered), seed=seed, epoch=0, salt=2)[: max(0, count)]:
            chosen[groups[ordered[place]]] = True
    return chosen


def oversampled(classes: np.ndarray, *, seed: int) -> np.ndarray:
    """Places of examples, those of rarer classes repeated until each has as many as the largest."""
    most = int(np.bincount(classes).max())
    found = []
    for number in np.unique(classes):
        places = np.flatnonzero(classes == number)
        whole, rest = divmod(most, len(places))
        extra = places[permutation(len(places), seed=seed, epoch=0, salt=3)[:rest]]
        found += [*[places] * whole, extra]
    return np.sort(np.concatenate(found))
