"""Classes in equal shares: records held out of each class alike, and rare classes repeated."""

import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from whet.data.class_labels import Labels
from whet.data.packing import permutation
from whet.data.tokens.examples import StoredExamples
from whet.errors import DataError

log = logging.getLogger("whet")


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


def describe_classes(names: Sequence[str], counts: Sequence[float] | np.ndarray) -> str:
    """Each class with its number of examples, for a person."""
    shown = (f"{count:,.1f}".removesuffix(".0") for count in counts)
    return ", ".join(f"{name} {count}" for name, count in zip(names, shown, strict=True))


def class_counts(labels: Labels, examples: StoredExamples) -> np.ndarray:
    """[classes] how many examples there are of each; soft labels count as the fractions they are."""
    if labels.multi_label:
        totals: np.ndarray = label_values(examples, len(labels.names)).sum(0)
        whole: np.ndarray = totals.astype(np.int64)
        return whole if np.array_equal(whole, totals) else totals
    return np.bincount(label_values(examples, 1)[:, 0].astype(np.int64), minlength=len(labels.names))


def hold_out(
    train: StoredExamples, classes: Labels, *, share: float, seed: int
) -> tuple[StoredExamples, StoredExamples, Mapping[str, object]]:
    """The training examples, those held out of them, and what says so in the run."""
    hashes = record_hashes(train)
    labels = (
        to_marks(label_values(train, len(classes.names))) if classes.multi_label else label_values(train, 1)
    )
    chosen = held_out(hashes, labels, share=share, seed=seed)
    if not chosen.any():
        raise DataError(
            f"{len(train)} training records are too few to hold any of them out",
            hint="give data.valid, or set objective.valid_share to 0",
        )
    valid, rest = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    log.info("valid: %d of %d training records held out, of each class alike", len(valid), len(train))
    record = {
        "seed": seed,
        "valid_share": share,
        "hash": "sha256 of the token ids as int64",
        "valid": sorted({hashes[place] for place in valid}),
    }
    return train.only(rest), train.only(valid), record


def without(examples: StoredExamples, texts: set[str]) -> StoredExamples:
    """The examples whose hashes are not among these."""
    kept = np.array([text not in texts for text in record_hashes(examples)], dtype=bool)
    if not kept.any():
        raise DataError(
            "every hard record is also a training record that was held out",
            hint="give data.valid, or set objective.valid_share to 0",
        )
    return examples if kept.all() else examples.only(np.flatnonzero(kept))
