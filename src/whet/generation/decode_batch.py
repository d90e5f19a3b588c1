"""The rows that decode together: their prompts read, their cache, and one more token each."""

from collections.abc import Sequence
from typing import Any

import torch

from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout

_SHARED_PREFIX = 8  # a common start shorter than this is not worth a pass of its own
_BLOCK = 64  # caches have a multiple of this many slots
_AHEAD = 512  # the most new tokens that they have room for from the start


class DecodeBatch:
    """Prompts of any lengths, left-padded: their cache, and the hidden state to go on from.

    What all prompts start with is read once, and so is a prompt that several rows have.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        self.model = model
        device = model.device
        distinct = {tuple(prompt): None for prompt in prompts}
        order = {prompt: place for place, prompt in enumerate(distinct)}
        unique = [list(prompt) for prompt in (distinct if model.paths.shared_prefixes else prompts)]
        ragged = len({*map(len, unique)}) > 1
        # padding would come after the common start: transformers' windows, slopes and states would count it
        can_share = model.paths.shared_prefixes and (isinstance(model, Decoder) or not ragged)
        shared = _common_prefix(unique) if can_share else 0
        width = max(map(len, unique))
        self.cache: Any = model.new_cache(slots_for(width, new_tokens))  # Any: opaque, but for keep(rows)
        if shared >= _SHARED_PREFIX:
            start = torch.tensor([unique[0][:shared]], device=device)
            model.hidden(start, None, Layout(visible=torch.ones_like(start, dtype=torch.bool)), self.cache)
            self.cache.keep(torch.zeros(len(unique), dtype=torch.long, device=device))
        else:
            shared = 0
        self._read_tails([prompt[shared:] for prompt in unique], shared)
        if len(unique) < len(prompts):
            self.keep(torch.tensor([order[tuple(prompt)] for prompt in prompts], device=device))

    def _read_tails(self, tails: Sequence[list[int]], shared: int) -> None:
        device = self.model.device
        width = max(map(len, tails))
        self.padded = any(len(tail) < width for tail in tails)
        tokens = torch.tensor([[0] * (width - len(tail)) + tail for tail in tails], device=device)
        lengths = torch.tensor([len(tail) for tail in tails], device=device)
        real = torch.arange(width, device=device) >= width - lengths[:, None]
        self.visible = torch.cat((real.new_ones(len(tails), shared), real), dim=1)
        positions = (shared + torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
        self.next_position = shared + lengths
        before = torch.arange(shared, device=device).expand(len(tails), -1)
        self.slots = torch.cat((before, positions), dim=1)
        self._read(tokens, positions)

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        layout = Layout.cached(self.visible, new_tokens=tokens.shape[1], padded=self.padded, slots=self.slots)
        self.hidden = self.model.hidden(tokens, positions, layout, self.cache)[:, -1]

    def logits(self) -> torch.Tensor:
        """Logits of each row's next token."""
        return self.model.logits(self.hidden)

    def advance(self, chosen: torch.Tensor) -> None:
        """Feed each row its new token."""
        self.visible = torch.cat((self.visible, self.visible.new_ones(len(chosen), 1)), dim=1)
        positions, self.next_position = self.next_position, self.next_position + 1
        self.slots = torch.cat((self.slots, positions[:, None]), dim=1)
        self._read(chosen[:, None], positions[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; one may be there several times."""
        self.cache.keep(rows)
        self.visible, self.slots = self.visible[rows], self.slots[rows]
        self.next_position, self.hidden = self.next_position[rows], self.hidden[rows]


def slots_for(filled: int, new_tokens: int) -> int:
    """The size of a cache that holds so many tokens and is to take up more."""
    return -(-(filled + min(new_tokens, max(filled, _AHEAD))) // _BLOCK) * _BLOCK


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts start with, leaving each at least one of its own."""
    if len(prompts) < 2:
        return 0
    shortest = min(map(len, prompts)) - 1
    first = prompts[0]
    for index in range(shortest):
        if any(prompt[index] != first[index] for prompt in prompts):
            return index
    return shortest
