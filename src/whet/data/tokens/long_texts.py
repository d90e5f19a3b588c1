"""Tokenize long texts window by window, with the same ids as in one piece and little memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.data.tokens.tokenize import MAX_WINDOW_CHARS
from whet.errors import DataError

OVERLAP_CHARS = 2**16  # shared by adjacent windows
_MATCH_CHARS = 2**12  # on each side of a cut, within which both windows must have the same tokens
MAX_UNSPLIT_CHARS = 2**22  # limit for a text whose windows do not agree: about 1 GB of memory

Encode = Callable[[str], Any]  # Any: tokenizers' Encoding, with offsets


@dataclass(frozen=True)
class Tokens:
    """Ids and character offsets: the part of tokenizers' Encoding that is used."""

    ids: np.ndarray  # [tokens]
    offsets: np.ndarray  # [tokens, 2]


def encode_long(text: str, encode: Encode, *, around: tuple[int, int], origin: str) -> Tokens:
    """Tokenize a long text.

    Adjacent windows overlap. They are joined in the middle of the overlap, at a token that starts in both and
    has the same tokens around it in both. If there is no such token, the text is tokenized in one piece,
    unless it is too long for that.

    Args:
        text: The text.
        encode: Tokenizes a window, with offsets.
        around: The number of special tokens that `encode` adds before and after each text.
        origin: The origin of the text, for messages.
    """
    front, back = around
    parts: list[Tokens] = []
    left, start = _window(text, 0, encode, around), 0
    while start + MAX_WINDOW_CHARS < len(text):
        next_start = start + MAX_WINDOW_CHARS - OVERLAP_CHARS
        right = _window(text, next_start, encode, around)
        boundary = _find_boundary(left, right, next_start + OVERLAP_CHARS // 2)
        if boundary is None:
            return _encode_unsplit(text, encode, origin)
        left_end, right_start = boundary
        parts.append(Tokens(left.ids[:left_end], left.offsets[:left_end]))
        left, start = Tokens(right.ids[right_start:], right.offsets[right_start:]), next_start
    parts.append(left)
    prefix, suffix = _special_ids(encode, front, back)
    ids = np.concatenate([prefix, *(part.ids for part in parts), suffix])
    special_offsets = [np.zeros((count, 2), dtype=np.int32) for count in (front, back)]
    return Tokens(
        ids, np.concatenate([special_offsets[0], *(part.offsets for part in parts), special_offsets[1]])
    )


def _window(text: str, start: int, encode: Encode, around: tuple[int, int]) -> Tokens:
    encoding = encode(text[start : start + MAX_WINDOW_CHARS])
    inner = slice(around[0], len(encoding.ids) - around[1])
    offsets = np.array(encoding.offsets[inner], dtype=np.int32).reshape(-1, 2)
    return Tokens(np.array(encoding.ids[inner], dtype=np.uint32), offsets + np.int32(start))


def _find_boundary(left: Tokens, right: Tokens, middle: int) -> tuple[int, int] | None:
    """Return the index, in each window, of the first token after the middle of the overlap."""
    low, high = middle - _MATCH_CHARS, middle + _MATCH_CHARS
    ranges = [np.searchsorted(part.offsets[:, 0], (low, middle, high)) for part in (left, right)]
    (first, begin, last), (first_right, end, last_right) = ranges
    is_same = (
        begin < last
        and (begin - first, last - first) == (end - first_right, last_right - first_right)
        and (left.offsets[first:last] == right.offsets[first_right:last_right]).all()
        and (left.ids[first:last] == right.ids[first_right:last_right]).all()
    )
    return (int(begin), int(end)) if is_same else None


def _special_ids(encode: Encode, front: int, back: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encode("a").ids, dtype=np.uint32)
    return ids[:front], ids[len(ids) - back :]


def _encode_unsplit(text: str, encode: Encode, origin: str) -> Tokens:
    if len(text) > MAX_UNSPLIT_CHARS:
        raise DataError(
            f"{origin}: a text of {len(text):,} characters cannot be split into windows with this tokenizer",
            hint=f"split it into records of at most {MAX_UNSPLIT_CHARS:,} characters",
        )
    encoding = encode(text)
    return Tokens(np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets, dtype=np.int32))
