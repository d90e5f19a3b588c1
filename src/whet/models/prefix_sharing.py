"""Prefix sharing: a prefix that packed documents have in common is computed once.

Examples are chats with the same system prompt, two responses to one prompt, and samples of one prompt. Hidden
states are equal up to the first token that differs. A row becomes a tree of segments, each of which attends
to its ancestors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whet.ops.attention import Layout

MIN_SHARED_TOKENS = 16  # shorter shared prefixes are not worth a segment
MIN_SAVED_FRACTION = 0.1  # of a row's positions; below it, sharing is not worth its overhead


@dataclass(frozen=True)
class SharedPrefixes:
    """A packed row with each shared prefix computed once."""

    computed: torch.Tensor  # [segments' tokens]: the positions of the row that are computed
    sources: torch.Tensor  # [T]: the index into `computed` for each position of the row
    layout: Layout


def share_prefixes(tokens: torch.Tensor, positions: torch.Tensor, layout: Layout) -> SharedPrefixes | None:
    """Return how to compute a packed row [1, T] with shared prefixes, or None if it saves too little."""
    if layout.documents is None or len(layout.documents) != 1 or len(layout.documents[0]) == 1:
        return None
    tree = _PrefixTree(tokens[0].numpy(), positions[0].numpy(), layout.documents[0])
    tree.grow(range(len(layout.documents[0])), 0, ())
    if tree.size > (1 - MIN_SAVED_FRACTION) * len(tree.sources):
        return None
    tree_layout = Layout(documents=(tuple(tree.lengths),), ancestors=tuple(tree.ancestors))
    return SharedPrefixes(
        torch.from_numpy(np.concatenate(tree.computed)), torch.from_numpy(tree.sources), tree_layout
    )


class _PrefixTree:
    """The segments of a row, parents before children."""

    def __init__(self, tokens: np.ndarray, positions: np.ndarray, documents: Sequence[int]) -> None:
        ends = np.cumsum(documents)
        self.starts = ends - np.array(documents)
        # a hidden state depends on all tokens up to it and on their positions
        row = np.stack((tokens, positions), axis=1)
        self.documents = [row[start:end] for start, end in zip(self.starts, ends, strict=True)]
        self.sources = np.empty(len(tokens), dtype=np.int64)
        self.size = 0
        self.computed: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.ancestors: list[tuple[int, ...]] = []

    def grow(self, members: Sequence[int], begin: int, ancestors: tuple[int, ...]) -> None:
        """Add the segments after offset `begin` of documents that are equal up to it."""
        groups: dict[bytes | int, list[int]] = {}
        for member in members:
            start = self.documents[member][begin : begin + MIN_SHARED_TOKENS]
            groups.setdefault(start.tobytes() if len(start) == MIN_SHARED_TOKENS else member, []).append(
                member
            )
        for group in groups.values():
            end = self._shared_end(group, begin)
            if end > begin:
                self._add(group, begin, end, ancestors)
            if len(group) > 1:
                self.grow(group, end, (*ancestors, len(self.lengths) - 1))

    def _shared_end(self, group: Sequence[int], begin: int) -> int:
        first = self.documents[group[0]]
        end = len(first)
        for member in group[1:]:
            document = self.documents[member]
            end = min(end, len(document))
            differences = np.flatnonzero((first[begin:end] != document[begin:end]).any(1))
            end = begin + int(differences[0]) if len(differences) else end
        return end

    def _add(self, group: Sequence[int], begin: int, end: int, ancestors: tuple[int, ...]) -> None:
        span = np.arange(begin, end)
        self.computed.append(self.starts[group[0]] + span)
        for member in group:
            self.sources[self.starts[member] + span] = self.size + span - begin
        self.size += len(span)
        self.lengths.append(len(span))
        self.ancestors.append(ancestors)
