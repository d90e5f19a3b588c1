"""A batch of prompts during decoding: the prefill, the key/value cache, and single-token steps."""

from collections.abc import Sequence
from typing import Any

import torch

from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout

_MIN_SHARED_PREFIX = 8  # a shorter shared prefix is not worth a separate forward pass
_BLOCK = 64  # the number of slots of a cache is a multiple of this
_MAX_RESERVED = 512  # the most new tokens for which a cache is allocated at once, unless more are filled


class DecodeBatch:
    """A left-padded batch of prompts of any lengths: the cache, and the last hidden state of each row.

    The shared prefix of all prompts is computed once, and so is a prompt that several rows have.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        self.model = model
        device = model.device
        distinct = {tuple(prompt): None for prompt in prompts}
        index_of = {prompt: index for index, prompt in enumerate(distinct)}
        unique = [list(prompt) for prompt in (distinct if model.paths.shared_prefixes else prompts)]
        is_ragged = len({*map(len, unique)}) > 1
        # padding would come after the shared prefix, and transformers' sliding windows, ALiBi slopes and
        # recurrent states would count it
        can_share = model.paths.shared_prefixes and (isinstance(model, Decoder) or not is_ragged)
        shared = _shared_prefix_length(unique) if can_share else 0
        width = max(map(len, unique))
        self.cache: Any = model.new_cache(
            cache_slots(width, new_tokens)
        )  # Any: opaque, except for keep(rows)
        if shared >= _MIN_SHARED_PREFIX:
            prefix = torch.tensor([unique[0][:shared]], device=device)
            model.hidden(prefix, None, Layout(visible=torch.ones_like(prefix, dtype=torch.bool)), self.cache)
            self.cache.select_rows(torch.zeros(len(unique), dtype=torch.long, device=device))
        else:
            shared = 0
        self._prefill([prompt[shared:] for prompt in unique], shared)
        if len(unique) < len(prompts):
            self.keep(torch.tensor([index_of[tuple(prompt)] for prompt in prompts], device=device))

    def _prefill(self, tails: Sequence[list[int]], shared: int) -> None:
        """Compute the prompts after their shared prefix of `shared` tokens."""
        device = self.model.device
        width = max(map(len, tails))
        self.padded = any(len(tail) < width for tail in tails)
        tokens = torch.tensor([[0] * (width - len(tail)) + tail for tail in tails], device=device)
        lengths = torch.tensor([len(tail) for tail in tails], device=device)
        is_token = torch.arange(width, device=device) >= width - lengths[:, None]  # not padding
        self.visible = torch.cat((is_token.new_ones(len(tails), shared), is_token), dim=1)
        positions = (shared + torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
        self.next_position = shared + lengths
        prefix_positions = torch.arange(shared, device=device).expand(len(tails), -1)
        self.slots = torch.cat((prefix_positions, positions), dim=1)
        self._forward(tokens, positions)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        layout = Layout.cached(self.visible, new_tokens=tokens.shape[1], padded=self.padded, slots=self.slots)
        self.hidden = self.model.hidden(tokens, positions, layout, self.cache)[:, -1]

    def logits(self) -> torch.Tensor:
        """Return the logits of each row's next token, [rows, vocab]."""
        return self.model.logits(self.hidden)

    def advance(self, tokens: torch.Tensor) -> None:
        """Feed each row its new token; tokens: [rows]."""
        self.visible = torch.cat((self.visible, self.visible.new_ones(len(tokens), 1)), dim=1)
        positions, self.next_position = self.next_position, self.next_position + 1
        self.slots = torch.cat((self.slots, positions[:, None]), dim=1)
        self._forward(tokens[:, None], positions[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with the rows of these indices, in this order; an index may occur several times."""
        self.cache.select_rows(rows)
        self.visible, self.slots = self.visible[rows], self.slots[rows]
        self.next_position, self.hidden = self.next_position[rows], self.hidden[rows]


def cache_slots(filled: int, new_tokens: int) -> int:
    """Return the number of slots of a cache with `filled` tokens that receives up to `new_tokens` more."""
    return -(-(filled + min(new_tokens, max(filled, _MAX_RESERVED))) // _BLOCK) * _BLOCK


def _shared_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the prefix that all prompts share, without the last token of any prompt."""
    if len(prompts) < 2:
        return 0
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    for index in range(limit):
        if any(prompt[index] != first[index] for prompt in prompts):
            return index
    return limit
