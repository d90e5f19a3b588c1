"""Token ids of long texts, window by window: those of the whole, in memory that hardly grows with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.errors import DataError

LONG = 2**20  # characters: a longer text is tokenised in windows
OVERLAP = 2**16  # characters that neighbouring windows share
_AGREEING = 2**12  # characters on both sides of a cut in which both windows must have the same tokens
MAX_WHOLE = 2**22  # characters of a text whose windows do not agree: about 1 GB

Encode = Callable[[str], Any]  # Any: tokenizers' Encoding, with offsets


@dataclass(frozen=True)
class Tokens:
    """Ids and character offsets; as much of tokenizers' Encoding as is read."""

    ids: np.ndarray  # [tokens]
    offsets: np.ndarray  # [tokens, 2]


def encode_long(text: str, encode: Encode, *, around: tuple[int, int], origin: str) -> Tokens:
    """Tokenise a long text.

    Neighbouring windows overlap, and are joined in the middle of what they share, at a token that begins in
    both and has the same tokens around it in both. Where there is none, the text is tokenised whole, unless
    it is too long for that.

    Args:
        text: the text.
        encode: what tokenises a window, with its offsets.
        around: how many special tokens it puts before and after each text.
        origin: of the text, for messages.
    """
    front, back = around
    parts: list[Tokens] = []
    left, start = _window(text, 0, encode, around), 0
    while start + LONG < len(text):
        following = start + LONG - OVERLAP
        right = _window(text, following, encode, around)
        cut = _cut(left, right, following + OVERLAP // 2)
        if cut is None:
            return _whole(text, encode, origin)
        begin, end = cut
        parts.append(Tokens(left.ids[:begin], left.offsets[:begin]))
        left, start = Tokens(right.ids[end:], right.offsets[end:]), following
    parts.append(left)
    before, after = _special(encode, front, back)
    ids = np.concatenate([before, *(part.ids for part in parts), after])
    none = [np.zeros((count, 2), dtype=np.int32) for count in (front, back)]
    return Tokens(ids, np.concatenate([none[0], *(part.offsets for part in parts), none[1]]))


def _window(text: str, start: int, encode: Encode, around: tuple[int, int]) -> Tokens:
    encoding = encode(text[start : start + LONG])
    inner = slice(around[0], len(encoding.ids) - around[1])
    offsets = np.array(encoding.offsets[inner], dtype=np.int32).reshape(-1, 2)
    return Tokens(np.array(encoding.ids[inner], dtype=np.uint32), offsets + np.int32(start))


def _cut(left: Tokens, right: Tokens, middle: int) -> tuple[int, int] | None:
    """The first token behind the middle of what two windows share, by its index in each."""
    low, high = middle - _AGREEING, middle + _AGREEING
    ranges = [np.searchsorted(part.offsets[:, 0], (low, middle, high)) for part in (left, right)]
    (first, begin, last), (first_right, end, last_right) = ranges
    same = (
        begin < last
        and (begin - first, last - first) == (end - first_right, last_right - first_right)
        and (left.offsets[first:last] == right.offsets[first_right:last_right]).all()
        and (left.ids[first:last] == right.ids[first_right:last_right]).all()
    )
    return (int(begin), int(end)) if same else None


def _special(encode: Encode, front: int, back: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encode("a").ids, dtype=np.uint32)
    return ids[:front], ids[len(ids) - back :]


def _whole(text: str, encode: Encode, origin: str) -> Tokens:
    if len(text) > MAX_WHOLE:
        raise DataError(
            f"{origin}: a text of {len(text):,} characters, which this tokenizer cannot cut anywhere",
            hint=f"split it into records of at most {MAX_WHOLE:,} characters",
        )
    encoding = encode(text)
    return Tokens(np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets, dtype=np.int32))
