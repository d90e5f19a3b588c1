"""Self-speculative decoding: multi-token prediction heads draft tokens, one forward pass verifies them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whet.generation.engine import check_prompts, decoding_mode
from whet.models.language_model import LanguageModel
from whet.models.mtp import PredictionHeads
from whet.ops.attention import Layout


@dataclass(frozen=True)
class Speculation:
    """The generated tokens, and how many drafted tokens were accepted."""

    tokens: list[int]
    passes: int  # forward passes of the model, including the prefill; plain decoding needs one per token
    guessed: int  # drafted tokens
    accepted: int  # drafted tokens that the model confirmed

    @property
    def acceptance(self) -> float:
        """The fraction of drafted tokens that were accepted."""
        return self.accepted / self.guessed if self.guessed else 0.0


def speculate(
    model: LanguageModel,
    heads: PredictionHeads,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
) -> Speculation:
    """Decode greedily from one prompt, with tokens drafted by the prediction heads.

    The tokens equal those of plain greedy decoding, because a drafted token is accepted only if it is the
    model's choice. If two tokens are equally likely up to rounding, the result may differ.

    Args:
        model: the model to decode with.
        heads: the model's multi-token prediction heads.
        prompt: the token ids of the prompt.
        max_tokens: the largest number of new tokens.
        stop_tokens: tokens that end decoding; they are not part of the result.

    Raises:
        DataError: the prompt is empty, exceeds the model's context, or has tokens outside its vocabulary.
    """
    check_prompts(model, [prompt])
    end = min(len(prompt) + max_tokens, model.max_positions)
    known, new, draft = list(prompt), list(prompt), list[int]()
    passes = guessed = accepted = 0
    with decoding_mode(model):
        cache, drafter = model.new_cache(), _Drafter(model, heads)
        while len(known) < end:
            hidden = _forward(model, new + draft, cache)
            choices = model.logits(hidden[0, len(new) - 1 :]).argmax(-1).tolist()
            correct = next((n for n, token in enumerate(draft) if token != choices[n]), len(draft))
            passes, guessed, accepted = passes + 1, guessed + len(draft), accepted + correct
            decoded = [*draft[:correct], choices[correct]]
            stop = next((n for n, token in enumerate(decoded) if token in stop_tokens), None)
            known += decoded[:stop]
            if stop is not None:
                break
            cache.truncate(len(known) - 1)
            # minus 1, because the pass that verifies the draft decodes one more token
            draft = drafter.draft(hidden[:, : len(new) + correct], known, count=end - len(known) - 1)
            new = known[-1:]
    return Speculation(known[len(prompt) :], passes, guessed, accepted)


def _forward(model: LanguageModel, tokens: list[int], cache: Any) -> torch.Tensor:  # Any: the model's cache
    """Return the hidden states [1, T, D] of tokens that follow those in the cache."""
    rows = torch.tensor([tokens], device=model.device)
    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)[None]
    return model.hidden(rows, positions, _cached_layout(cache.length, rows), cache)


def _cached_layout(length: int, new: torch.Tensor) -> Layout:
    """Return the causal layout of new positions [1, T, ...] after `length` cached ones."""
    visible = torch.ones(1, length + new.shape[1], dtype=torch.bool, device=new.device)
    return Layout.cached(visible, new_tokens=new.shape[1], padded=False)


class _Drafter:
    """Drafts tokens with the prediction heads, which have their own cache.

    At each position, head k reads the token k positions later. At the last positions this is a drafted token,
    so their cache entries are removed after each round, and recomputed from the decoded tokens.
    """

    def __init__(self, model: LanguageModel, heads: PredictionHeads) -> None:
        self.model = model
        self.heads = heads
        self.cache = heads.new_cache()
        self.hidden: torch.Tensor | None = None  # hidden states of the positions that are not in the cache

    def draft(self, hidden: torch.Tensor, known: list[int], *, count: int) -> list[int]:
        """Return up to `count` drafted tokens after the known ones.

        Args:
            hidden: the model's hidden states since the last call, up to the last but one known token.
            known: the prompt and the decoded tokens.
            count: the largest number of tokens to draft.
        """
        if count < 1:
            return []  # all later calls return here, too, because the remaining length only shrinks
        if self.hidden is not None:
            hidden = torch.cat((self.hidden, hidden), dim=1)
        start, stop = self.cache.length, len(known) - 1  # positions of the hidden states
        layout = _cached_layout(start, hidden)
        positions = torch.arange(start, stop, device=hidden.device)[None]
        tokens, state = list(known), hidden
        for depth in range(1, min(count, len(self.heads)) + 1):
            later = torch.tensor([tokens[start + depth : stop + depth]], device=hidden.device)
            state = self.heads.advance(
                depth, state, self.model.embed(later), positions=positions, layout=layout, cache=self.cache
            )
            tokens.append(int(self.model.logits(state[0, -1]).argmax()))
        final = max(0, stop + 1 - len(self.heads))  # positions at which no head has read a drafted token
        self.cache.truncate(final)
        self.hidden = hidden[:, final - start :]
        return tokens[len(known) :]
