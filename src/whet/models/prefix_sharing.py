"""Packed documents that begin alike: what they share is computed once.

Chats with one system prompt, two answers to one question, samples of one prompt: up to where two documents
differ, their hidden states are the same. A row becomes a tree of pieces, each of which sees those above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whet.ops.attention import Layout

LEAST = 16  # tokens that documents share at least, to be worth a piece of their own
WORTH = 0.1  # of a row's places, that have to be saved


@dataclass(frozen=True)
class Shared:
    """A packed row without what is in it twice."""

    kept: torch.Tensor  # [fewer] the places of the row that are computed
    places: torch.Tensor  # [T] which of those each place of the row is like
    layout: Layout


def share_prefixes(tokens: torch.Tensor, positions: torch.Tensor, layout: Layout) -> Shared | None:
    """A way to compute a row [1, T] of documents with fewer places, if that is worth it."""
    if layout.documents is None or len(layout.documents) != 1 or len(layout.documents[0]) == 1:
        return None
    tree = _Tree(tokens[0].numpy(), positions[0].numpy(), layout.documents[0])
    tree.grow(range(len(layout.documents[0])), 0, ())
    if tree.size > (1 - WORTH) * len(tree.places):
        return None
    pieces = Layout(documents=(tuple(tree.lengths),), above=tuple(tree.above))
    return Shared(torch.from_numpy(np.concatenate(tree.kept)), torch.from_numpy(tree.places), pieces)


class _Tree:
    """Pieces of a row, parents before children."""

    def __init__(self, tokens: np.ndarray, positions: np.ndarray, documents: Sequence[int]) -> None:
        ends = np.cumsum(documents)
        self.starts = ends - np.array(documents)
        # a state depends on all tokens before it and on where they stand
        row = np.stack((tokens, positions), axis=1)
        self.documents = [row[start:end] for start, end in zip(self.starts, ends, strict=True)]
        self.places = np.empty(len(tokens), dtype=np.int64)
        self.size = 0
        self.kept: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.above: list[tuple[int, ...]] = []

    def grow(self, members: Sequence[int], begin: int, above: tuple[int, ...]) -> None:
        """Add what comes after `begin` in some documents, which are alike up to there."""
        groups: dict[bytes | int, list[int]] = {}
        for member in members:
            head = self.documents[member][begin : begin + LEAST]
            groups.setdefault(head.tobytes() if len(head) == LEAST else member, []).append(member)
        for group in groups.values():
            end = self._alike_until(group, begin)
            if end > begin:
                self._add(group, begin, end, above)
            if len(group) > 1:
                self.grow(group, end, (*above, len(self.lengths) - 1))

    def _alike_until(self, group: Sequence[int], begin: int) -> int:
        first = self.documents[group[0]]
        end = len(first)
        for member in group[1:]:
            other = self.documents[member]
            end = min(end, len(other))
            differ = np.flatnonzero((first[begin:end] != other[begin:end]).any(1))
            end = begin + int(differ[0]) if len(differ) else end
        return end

    def _add(self, group: Sequence[int], begin: int, end: int, above: tuple[int, ...]) -> None:
        span = np.arange(begin, end)
        self.kept.append(self.starts[group[0]] + span)
        for member in group:
            self.places[self.starts[member] + span] = self.size + span - begin
        self.size += len(span)
        self.lengths.append(len(span))
        self.above.append(above)
