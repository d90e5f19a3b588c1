"""One pass over the tokens of a split: what is in it twice, and how its examples begin and end."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from whet.data.tokens.eos_check import learned_ends
from whet.data.tokens.examples import StoredExamples
from whet.data.tokens.token_store import TokenStore


@dataclass(frozen=True)
class Twins:
    """Records with the same tokens: how many there are besides the first, and a pair of them."""

    count: int = 0
    pair: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Scan:
    """What one pass finds. Memory: eight bytes a record."""

    hashes: np.ndarray  # [records] of the token ids
    doubled_bos: int
    first_doubled: str
    ended: int  # examples that teach the model to end its answer


def scan(examples: StoredExamples, *, bos: int | None, ends: Collection[int]) -> Scan:
    """Read every record once."""
    store = examples.store
    hashes = np.zeros(len(store), dtype=np.uint64)
    first_example = np.searchsorted(examples.records, np.arange(len(store) + 1))
    doubled: list[int] = []
    count = ended = 0
    for record in range(len(store)):
        start = int(store.bounds[record])
        ids, marks = store.read(start, int(store.bounds[record + 1]))
        hashes[record] = _hash(ids)
        if bos is not None and ids[:2].tolist() == [bos, bos]:
            count += 1
            doubled = doubled or [record]
        places = learned_ends(ids, marks, ends) + start
        for example in range(first_example[record], first_example[record + 1]) if len(places) else ():
            # the first token of an example has nothing before it to be predicted from
            inside = (places > examples.starts[example]) & (places < examples.stops[example])
            ended += bool(inside.any())
    return Scan(hashes, count, store.origin(doubled[0]) if doubled else "", ended)


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def pair_hashes(hashes: np.ndarray) -> np.ndarray:
    """[pairs] of the hashes of their two sides, in this order."""
    sides = hashes.reshape(-1, 2)
    with np.errstate(over="ignore"):
        combined: np.ndarray = sides[:, 0] * np.uint64(0x9E3779B97F4A7C15) + sides[:, 1]
    return combined


def _sides(store: TokenStore, hashes: np.ndarray) -> int:
    """How many records of a store there are to each hash: two of a pair."""
    return len(store) // max(1, len(hashes))


def duplicates(store: TokenStore, hashes: np.ndarray) -> Twins:
    """Records that are in a split more than once; the repeats that a mixture's weights ask for are none."""
    sides = _sides(store, hashes)
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    count, pair = 0, ("", "")
    first, seen = "", set[str]()
    for place in np.flatnonzero(same).tolist():
        if not place or not same[place - 1]:
            first = store.origin(sides * int(order[place]))
            seen = {first}
        origin = store.origin(sides * int(order[place + 1]))
        if origin not in seen:
            seen.add(origin)
            pair = pair if count else (first, origin)
            count += 1
    return Twins(count, pair)


def overlap(held: TokenStore, held_hashes: np.ndarray, learned: TokenStore, hashes: np.ndarray) -> Twins:
    """Records of a held-out split that are also learned from."""
    found = np.flatnonzero(np.isin(held_hashes, hashes))
    if not len(found):
        return Twins()
    learned_record = int(np.flatnonzero(hashes == held_hashes[found[0]])[0])
    pair = (
        held.origin(_sides(held, held_hashes) * int(found[0])),
        learned.origin(_sides(learned, hashes) * learned_record),
    )
    return Twins(len(found), pair)
