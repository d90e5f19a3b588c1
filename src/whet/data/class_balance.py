"""Stratified hold-out sets and oversampling of rare classes."""

import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from whet.data.class_labels import ClassLabels
from whet.data.packing import seeded_permutation
from whet.data.tokens.examples import StoredExamples
from whet.errors import DataError

log = logging.getLogger("whet")


def record_hashes(examples: StoredExamples) -> list[str]:
    """Return the SHA-256 of each example's token ids."""
    return [
        hashlib.sha256(examples.store.read(int(start), int(stop))[0].tobytes()).hexdigest()
        for start, stop in zip(examples.starts, examples.stops, strict=True)
    ]


def label_values(examples: StoredExamples, count: int) -> np.ndarray:
    """Return the first `count` values of each example, [examples, count]: its class or its targets."""
    values: np.ndarray = np.array(examples.store.values)[examples.records][:, :count]
    return values


def to_boolean_targets(targets: np.ndarray) -> np.ndarray:
    """Return multi-label targets as booleans: true above 0.5."""
    is_positive: np.ndarray = targets > 0.5
    return is_positive


def select_held_out(hashes: list[str], labels: np.ndarray, *, share: float, seed: int) -> np.ndarray:
    """Return a mask [examples] of the examples to hold out: a share of each class, at least one, never all.

    Equal texts are never separated, so that both sides are disjoint. Classes (or combinations of them) with
    a single text are pooled.
    """
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(hashes):
        groups.setdefault(text, []).append(index)
    strata: dict[tuple[float, ...], list[str]] = {}
    for text, indices in groups.items():
        strata.setdefault(tuple(labels[indices[0]].tolist()), []).append(text)
    singletons = [text for texts in strata.values() if len(texts) == 1 for text in texts]
    is_held_out = np.zeros(len(hashes), dtype=bool)
    for texts in [*(texts for texts in strata.values() if len(texts) > 1), singletons]:
        sorted_texts = sorted(texts)  # independent of the record order
        count = min(max(1, round(share * len(sorted_texts))), len(sorted_texts) - 1)
        for index in seeded_permutation(len(sorted_texts), seed=seed, epoch=0, salt=2)[: max(0, count)]:
            is_held_out[groups[sorted_texts[index]]] = True
    return is_held_out


def oversample_indices(classes: np.ndarray, *, seed: int) -> np.ndarray:
    """Return example indices in which rarer classes are repeated to the size of the largest class."""
    largest = int(np.bincount(classes).max())
    parts = []
    for class_index in np.unique(classes):
        indices = np.flatnonzero(classes == class_index)
        repeats, remainder = divmod(largest, len(indices))
        extra = indices[seeded_permutation(len(indices), seed=seed, epoch=0, salt=3)[:remainder]]
        parts += [*[indices] * repeats, extra]
    return np.sort(np.concatenate(parts))


def describe_classes(names: Sequence[str], counts: Sequence[float] | np.ndarray) -> str:
    """Return each class with its number of examples as text."""
    formatted = (f"{count:,.1f}".removesuffix(".0") for count in counts)
    return ", ".join(f"{name} {count}" for name, count in zip(names, formatted, strict=True))


def class_counts(labels: ClassLabels, examples: StoredExamples) -> np.ndarray:
    """Return the number of examples per class, [classes]. Soft labels count as fractions."""
    if labels.multi_label:
        totals: np.ndarray = label_values(examples, len(labels.names)).sum(0)
        rounded: np.ndarray = totals.astype(np.int64)
        return rounded if np.array_equal(rounded, totals) else totals
    return np.bincount(label_values(examples, 1)[:, 0].astype(np.int64), minlength=len(labels.names))


def hold_out(
    train: StoredExamples, classes: ClassLabels, *, share: float, seed: int
) -> tuple[StoredExamples, StoredExamples, Mapping[str, object]]:
    """Split the training examples. Return those that remain, those held out, and a record of the split."""
    hashes = record_hashes(train)
    labels = (
        to_boolean_targets(label_values(train, len(classes.names)))
        if classes.multi_label
        else label_values(train, 1)
    )
    is_held_out = select_held_out(hashes, labels, share=share, seed=seed)
    if not is_held_out.any():
        raise DataError(
            f"{len(train)} training records are too few for a validation set",
            hint="set data.valid, or set objective.valid_share to 0",
        )
    valid, remaining = np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)
    log.info("valid: held out %d of %d training records, stratified by class", len(valid), len(train))
    record = {
        "seed": seed,
        "valid_share": share,
        "hash": "sha256 of the token ids as int64",
        "valid": sorted({hashes[index] for index in valid}),
    }
    return train.select(remaining), train.select(valid), record


def exclude_texts(examples: StoredExamples, texts: set[str]) -> StoredExamples:
    """Return the examples whose hashes are not in `texts`."""
    is_kept = np.array([text not in texts for text in record_hashes(examples)], dtype=bool)
    if not is_kept.any():
        raise DataError(
            "every hard record equals a training record that was held out",
            hint="set data.valid, or set objective.valid_share to 0",
        )
    return examples if is_kept.all() else examples.select(np.flatnonzero(is_kept))
