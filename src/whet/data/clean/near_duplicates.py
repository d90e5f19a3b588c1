"""Near duplicates: MinHash LSH proposes candidates, and their exact Jaccard similarity decides."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from whet.data.clean.record_turns import CONTEXT, LABEL, normalize_text
from whet.data.clean.word_ngrams import hash_ngrams, hash_text, split_words_and_signs
from whet.errors import ConfigError, DataError, check_positive

DEFAULT_THRESHOLD = 0.8
DEFAULT_SHINGLE = 5  # words
PERMUTATIONS = 128
RECALL = 0.99  # of pairs exactly at the threshold; that of more similar pairs is higher
_CHUNK = 4096  # shingles; MinHash computes [shingles, permutations] at once

Shingles = dict[str, np.ndarray]  # hashes of the shingles of each part of a record, sorted, without repeats


class NearDuplicate(NamedTuple):
    """An earlier record that is similar to a record."""

    record: int
    similarity: float


def shingle_parts(parts: Mapping[str, str], size: int) -> Shingles:
    """Return the shingles of each part: n-grams of `size` words, or all words of a shorter part.

    The name of a part is mixed into its hashes, so that no two parts have a shingle in common. A label has a
    single shingle: it is equal to another or not.
    """
    shingles = {}
    for name, text in parts.items():
        if name == LABEL:
            hashes = np.array([hash_text(normalize_text(text))], dtype=np.uint64)
        else:
            words = split_words_and_signs(text)
            hashes = hash_ngrams(words, min(size, len(words))) if words else np.array([], dtype=np.uint64)
        shingles[name] = np.unique(hashes ^ np.uint64(hash_text(f" {name}")))
    return shingles


def similarity(one: Shingles, other: Shingles) -> float:
    """Return the smallest Jaccard similarity of a part; a part that only one record has counts as 0.

    With the smallest instead of the mean, a long prompt cannot hide that two short answers differ.
    """
    return min((_jaccard(one.get(name), other.get(name)) for name in one.keys() | other.keys()), default=0.0)


def _jaccard(one: np.ndarray | None, other: np.ndarray | None) -> float:
    sizes = [0 if each is None else len(each) for each in (one, other)]
    if not any(sizes):
        return 1.0  # two empty texts
    if one is None or other is None:
        return 0.0
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (sum(sizes) - shared)


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return the number of LSH bands and their rows: as few bands as reach the recall at the threshold.

    False candidates only cost time, because each candidate is verified.
    """
    for rows in range(PERMUTATIONS // 2, 1, -1):
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return PERMUTATIONS, 1


class NearDuplicateIndex:
    """The records that are kept so far, to find one that a new record repeats.

    Args:
        threshold: The Jaccard similarity from which two records are near duplicates.
        shingle: The number of words of a shingle.
    """

    def __init__(self, *, threshold: float = DEFAULT_THRESHOLD, shingle: int = DEFAULT_SHINGLE) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be above 0 and at most 1, not {threshold:g}")
        check_positive(shingle=shingle)
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise DataError(
                f"near duplicates need {error.name or error}",
                hint='pip install "whet[clean]", or leave them in with --no-near',
            ) from error
        self._threshold = threshold
        self._shingle = shingle
        self._lsh = MinHashLSH(num_perm=PERMUTATIONS, params=choose_bands(threshold))
        # shingles are hashed already: MinHash takes 32 of their 64 bits
        self._empty = MinHash(num_perm=PERMUTATIONS, hashfunc=int, scheme="affine32")
        self._kept: list[tuple[int, Shingles]] = []
        self._signatures = np.zeros((1024, PERMUTATIONS), dtype=np.uint32)  # of the kept records, and room

    def add(self, index: int, parts: Mapping[str, str]) -> NearDuplicate | None:
        """Return the first kept record that a record repeats, or keep it and return None."""
        shingles = shingle_parts(parts, self._shingle)
        if not any(len(hashes) for name, hashes in shingles.items() if name not in (CONTEXT, LABEL)):
            return None  # nothing but a label or a system prompt
        sketch = self._sketch(shingles)
        for candidate in self._candidates(sketch):
            kept_index, kept_shingles = self._kept[candidate]
            value = similarity(shingles, kept_shingles)
            if value >= self._threshold:
                return NearDuplicate(kept_index, value)
        self._keep(index, shingles, sketch)
        return None

    def _candidates(self, sketch: Any) -> list[int]:  # Any: datasketch is an optional package
        """Return the positions of similar kept records, in order.

        Where thousands of records have half their words in common, LSH proposes many of them. Those whose
        signatures are five standard deviations below the threshold are left out.
        """
        positions = np.sort(np.array(self._lsh.query(sketch), dtype=np.int64))
        estimates = (self._signatures[positions] == sketch.hashvalues).mean(1)
        deviation = math.sqrt(self._threshold * (1 - self._threshold) / PERMUTATIONS)
        similar: list[int] = positions[estimates >= self._threshold - 5 * deviation].tolist()
        return similar

    def _keep(self, index: int, shingles: Shingles, sketch: Any) -> None:  # Any: as above
        position = len(self._kept)
        if position == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.zeros_like(self._signatures)])
        self._signatures[position] = sketch.hashvalues
        self._lsh.insert(position, sketch, check_duplication=False)
        self._kept.append((index, shingles))

    def _sketch(self, shingles: Shingles) -> Any:  # Any: as above
        """Return the MinHash of all parts but the context, which thousands of records may share.

        If every part has at least the threshold's similarity, so has their union.
        """
        sketch = self._empty.copy()
        for name, hashes in shingles.items():
            if name != CONTEXT:
                short = (hashes >> np.uint64(32)).tolist()
                for start in range(0, len(short), _CHUNK):
                    sketch.update_batch(short[start : start + _CHUNK])
        return sketch
