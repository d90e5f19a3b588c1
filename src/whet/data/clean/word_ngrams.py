"""Word n-grams: how texts are cut into words, hashed, and searched for the n-grams of other texts."""

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

DEFAULT_NGRAM = 13  # words
# scripts that are written without spaces: each character counts as a word
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_WORD_OR_SIGN = re.compile(rf"{_WORD.pattern}|[^\w\s]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C13)  # odd, and one less is not divisible by 4


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def split_words_and_signs(text: str) -> list[str]:
    """Return the words of a text in lower case, and each punctuation mark as a word."""
    return _WORD_OR_SIGN.findall(text.lower())


def hash_text(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_hash_word = functools.lru_cache(maxsize=2**18)(hash_text)


def hash_ngrams(words: Sequence[str], size: int) -> np.ndarray:
    """Return 64-bit hashes of all n-grams of `size` words in order, [max(0, words - size + 1)] uint64.

    An n-gram's hash is a polynomial of the hashes of its words: two that differ are equal with a probability
    of about 2^-63.
    """
    word_hashes = np.fromiter(map(_hash_word, words), dtype=np.uint64, count=len(words))
    count = max(0, len(words) - size + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(size):
        hashes = hashes * _MULTIPLIER + word_hashes[offset : offset + count]
    return hashes


@dataclass(frozen=True)
class NgramMatch:
    """An n-gram of a text that an indexed item contains."""

    item: int
    start: int  # its first word in the text
    size: int  # words


class NgramIndex:
    """The n-grams of items, to search texts for them. Memory: 16 bytes per n-gram.

    Args:
        items: The words of each item.
        ngram: The number of words that make an overlap.
        short_items: Whether an item with fewer words is searched for as a whole, or not at all.
    """

    def __init__(self, items: Iterable[Sequence[str]], ngram: int, *, short_items: bool) -> None:
        hashes: dict[int, list[np.ndarray]] = {}  # by number of words
        owners: dict[int, list[np.ndarray]] = {}
        for index, words in enumerate(items):
            size = min(ngram, len(words))
            if size and (size == ngram or short_items):
                unique = np.unique(hash_ngrams(words, size))
                hashes.setdefault(size, []).append(unique)
                owners.setdefault(size, []).append(np.full(len(unique), index))
        self._by_size: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for size, arrays in hashes.items():
            joined = np.concatenate(arrays)
            order = np.argsort(joined, kind="stable")  # items with the same n-gram stay in order
            self._by_size[size] = joined[order], np.concatenate(owners[size])[order]

    def search(self, words: Sequence[str]) -> Iterator[NgramMatch]:
        """Yield the n-grams of a text that items contain, once for each item, in the order of the text."""
        for size, (known, owners) in self._by_size.items():
            hashes = hash_ngrams(words, size)
            first, last = (np.searchsorted(known, hashes, side=side) for side in ("left", "right"))
            for start in np.flatnonzero(first < last).tolist():
                for item in owners[first[start] : last[start]].tolist():
                    yield NgramMatch(item, start, size)
