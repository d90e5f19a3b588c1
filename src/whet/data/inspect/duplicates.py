"""Scan the tokens of a split once: duplicates, doubled BOS and supervised end tokens."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from whet.data.tokens.eos_check import supervised_ends
from whet.data.tokens.examples import StoredExamples
from whet.data.tokens.token_store import TokenArrays


@dataclass(frozen=True)
class Duplicates:
    """Records with the same tokens: the number of repetitions, and one pair of origins."""

    count: int = 0
    pair: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class SplitScan:
    """Results of one pass over a split. Memory: eight bytes per record."""

    hashes: np.ndarray  # [records] hashes of the token ids
    doubled_bos: int
    first_doubled: str
    with_supervised_end: int  # examples with a supervised end token


def scan_split(examples: StoredExamples, *, bos: int | None, end_tokens: Collection[int]) -> SplitScan:
    """Read every record once, and return its hash and the counts of doubled BOS and end tokens."""
    store = examples.store
    hashes = np.zeros(len(store), dtype=np.uint64)
    first_example = np.searchsorted(examples.records, np.arange(len(store) + 1))
    first_doubled: list[int] = []
    doubled_count = ended = 0
    for record in range(len(store)):
        start = int(store.bounds[record])
        ids, mask = store.read(start, int(store.bounds[record + 1]))
        hashes[record] = _hash(ids)
        if bos is not None and ids[:2].tolist() == [bos, bos]:
            doubled_count += 1
            first_doubled = first_doubled or [record]
        end_positions = supervised_ends(ids, mask, end_tokens) + start
        for example in range(first_example[record], first_example[record + 1]) if len(end_positions) else ():
            # the first token of an example is never a target
            is_inside = (end_positions > examples.starts[example]) & (end_positions < examples.stops[example])
            ended += bool(is_inside.any())
    return SplitScan(hashes, doubled_count, store.origin(first_doubled[0]) if first_doubled else "", ended)


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def pair_hashes(hashes: np.ndarray) -> np.ndarray:
    """Return one hash per pair, [pairs], from the hashes of its two sides in order."""
    sides = hashes.reshape(-1, 2)
    with np.errstate(over="ignore"):
        combined: np.ndarray = sides[:, 0] * np.uint64(0x9E3779B97F4A7C15) + sides[:, 1]
    return combined


def _sides(store: TokenArrays, hashes: np.ndarray) -> int:
    """Return the number of records per hash: two for pairs."""
    return len(store) // max(1, len(hashes))


def duplicates(store: TokenArrays, hashes: np.ndarray) -> Duplicates:
    """Return the records that occur more than once; repetitions due to mixture weights do not count."""
    sides = _sides(store, hashes)
    order = np.argsort(hashes, kind="stable")
    equals_next = hashes[order][1:] == hashes[order][:-1]
    count, pair = 0, ("", "")
    first, seen = "", set[str]()
    for index in np.flatnonzero(equals_next).tolist():
        if not index or not equals_next[index - 1]:
            first = store.origin(sides * int(order[index]))
            seen = {first}
        origin = store.origin(sides * int(order[index + 1]))
        if origin not in seen:
            seen.add(origin)
            pair = pair if count else (first, origin)
            count += 1
    return Duplicates(count, pair)


def overlap(
    held_out: TokenArrays, held_out_hashes: np.ndarray, trained: TokenArrays, hashes: np.ndarray
) -> Duplicates:
    """Return the records of a held-out split that are also in the training data."""
    shared = np.flatnonzero(np.isin(held_out_hashes, hashes))
    if not len(shared):
        return Duplicates()
    trained_record = int(np.flatnonzero(hashes == held_out_hashes[shared[0]])[0])
    pair = (
        held_out.origin(_sides(held_out, held_out_hashes) * int(shared[0])),
        trained.origin(_sides(trained, hashes) * trained_record),
    )
    return Duplicates(len(shared), pair)
