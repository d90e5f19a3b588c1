"""Self-speculative decoding: the heads of multi-token prediction guess, one pass of the model checks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whet.generation.engine import check_prompts, generating
from whet.models.language_model import LanguageModel
from whet.models.mtp import PredictionHeads
from whet.ops.attention import Layout


@dataclass(frozen=True)
class Speculation:
    """What was decoded, and how well the guesses were."""

    tokens: list[int]
    passes: int  # of the model, that over the prompt included; plain decoding makes one a token
    guessed: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Share of the guesses that the model would have made."""
        return self.accepted / self.guessed if self.guessed else 0.0


def speculate(
    model: LanguageModel,
    heads: PredictionHeads,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
) -> Speculation:
    """What follows a prompt, greedily, up to a stop token (left out) or `max_tokens`.

    The tokens are those of plain decoding: a guess counts only when it is the model's own choice. Where two
    tokens are equally likely to the last bit or so, the order in which sums are rounded may decide.
    """
    check_prompts(model, [prompt])
    end = min(len(prompt) + max_tokens, model.max_positions)
    known, new, guesses = list(prompt), list(prompt), list[int]()
    passes = guessed = accepted = 0
    with generating(model):
        cache, guesser = model.new_cache(), _Guesser(model, heads)
        while len(known) < end:
            hidden = _read(model, new + guesses, cache)
            choices = model.logits(hidden[0, len(new) - 1 :]).argmax(-1).tolist()
            right = next((n for n, guess in enumerate(guesses) if guess != choices[n]), len(guesses))
            passes, guessed, accepted = passes + 1, guessed + len(guesses), accepted + right
            found = [*guesses[:right], choices[right]]
            stop = next((n for n, token in enumerate(found) if token in stop_tokens), None)
            known += found[:stop]
            if stop is not None:
                break
            cache.truncate(len(known) - 1)
            # the pass that checks them brings one token more
            guesses = guesser.guess(hidden[:, : len(new) + right], known, count=end - len(known) - 1)
            new = known[-1:]
    return Speculation(known[len(prompt) :], passes, guessed, accepted)


def _read(model: LanguageModel, tokens: list[int], cache: Any) -> torch.Tensor:  # Any: the model's own
    """Hidden states [1, T, D] of tokens after those in the cache."""
    rows = torch.tensor([tokens], device=model.device)
    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)[None]
    return model.hidden(rows, positions, _after(cache.length, rows), cache)


def _after(length: int, new: torch.Tensor) -> Layout:
    """New positions [1, T, ...] that see themselves and `length` before them."""
    visible = torch.ones(1, length + new.shape[1], dtype=torch.bool, device=new.device)
    return Layout.cached(visible, new_tokens=new.shape[1], padded=False)


class _Guesser:
    """The heads, with a cache of their own.

    Head k reads, at each position, the token k ahead. At the last positions that is a guess, so what the
    cache holds of them is forgotten after each round, and made again from what was decoded.
    """

    def __init__(self, model: LanguageModel, heads: PredictionHeads) -> None:
        self.model = model
        self.heads = heads
        self.cache = heads.new_cache()
        self.hidden: torch.Tensor | None = None  # of the positions that are not in the cache

    def guess(self, hidden: torch.Tensor, known: list[int], *, count: int) -> list[int]:
        """Up to `count` tokens after the known ones, from the hidden states of all but the last of these."""
        if count < 1:
            return []  # and never again: what is left to decode only shrinks
        if self.hidden is not None:
            hidden = torch.cat((self.hidden, hidden), dim=1)
        start, stop = self.cache.length, len(known) - 1  # the positions of these states
        layout = _after(start, hidden)
        positions = torch.arange(start, stop, device=hidden.device)[None]
        tokens, state = list(known), hidden
        for depth in range(1, min(count, len(self.heads)) + 1):
            ahead = torch.tensor([tokens[start + depth : stop + depth]], device=hidden.device)
            state = self.heads.advance(
                depth, state, self.model.embed(ahead), positions=positions, layout=layout, cache=self.cache
            )
            tokens.append(int(self.model.logits(state[0, -1]).argmax()))
        final = max(0, stop + 1 - len(self.heads))  # positions at which no head has read a guess
        self.cache.truncate(final)
        self.hidden = hidden[:, final - start :]
        return tokens[len(known) :]
