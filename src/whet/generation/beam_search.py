"""Beam search: the likeliest continuations, not one token at a time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from whet.errors import ConfigError
from whet.generation.decode_batch import DecodeBatch
from whet.generation.engine import check_prompts, generating
from whet.models.language_model import LanguageModel


@dataclass(frozen=True)
class Hypothesis:
    """One continuation that beam search found."""

    tokens: list[int]  # with the stop token, where one ended it
    logprob: float  # the sum over its tokens
    score: float  # logprob / length ** length_penalty
    finished: bool  # ended by a stop token, not by length


def beam_search(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    beams: int,
    max_tokens: int,
    stop_tokens: Collection[int],
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """The best continuations of a prompt, at most `beams` of them, the best first.

    What transformers' `generate(num_beams=...)` finds: ended hypotheses are kept apart from the beams that go
    on; the search is over when the best beam, at its present length, cannot enter the full list of ended
    ones; what is still open at `max_tokens` counts as ended there. Scores are log-probabilities over the
    number of tokens to the power of `length_penalty`: above 0, longer continuations are favoured.
    """
    check_prompts(model, [prompt])
    if beams < 1:
        raise ConfigError(f"beams={beams}: at least one is needed")
    max_tokens = min(max_tokens, model.max_positions - len(prompt))
    if max_tokens < 1:
        return []
    with generating(model):
        return _Search(model, prompt, beams, max_tokens, stop_tokens, length_penalty).run()


class _Search:
    def __init__(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        beams: int,
        max_tokens: int,
        stop_tokens: Collection[int],
        length_penalty: float,
    ) -> None:
        self.beams, self.max_tokens = beams, max_tokens
        self.stop_tokens, self.length_penalty = stop_tokens, length_penalty
        self.rows = DecodeBatch(model, [prompt], new_tokens=max_tokens)
        self.ended: list[Hypothesis] = []
        self.open: list[tuple[list[int], float]] = [([], 0.0)]  # tokens and log-probability, the best first

    def run(self) -> list[Hypothesis]:
        """Extend the beams until nothing better can come."""
        while True:
            parents = self._extend()
            if not self.open or self._settled():
                return self.ended
            device = self.rows.visible.device
            self.rows.keep(torch.tensor(parents, device=device))
            self.rows.advance(torch.tensor([tokens[-1] for tokens, _ in self.open], device=device))

    def _extend(self) -> list[int]:
        """The beams one token longer; returns which of the old ones each of them goes on from."""
        logits = self.rows.logits()
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        before = torch.tensor([found for _, found in self.open], dtype=logprobs.dtype, device=logprobs.device)
        totals = logprobs + before[:, None]
        # enough for `beams` that go on, even if every beam may also end in every stop token
        wanted = min(max(2, 1 + len(self.stop_tokens)) * self.beams, totals.numel())
        best, places = totals.flatten().topk(wanted)
        vocabulary = totals.shape[1]
        candidates = [
            (place // vocabulary, place % vocabulary, total)
            for place, total in zip(places.tolist(), best.tolist(), strict=True)
        ]
        going_on: list[tuple[list[int], float]] = []
        parents = []
        for rank, (parent, token, total) in enumerate(candidates):
            tokens = [*self.open[parent][0], token]
            stopped = token in self.stop_tokens
            if stopped or len(tokens) == self.max_tokens:
                if rank < self.beams:  # what is worse than all beams is no result, even if it has ended
                    self._end(tokens, total, finished=stopped)
            elif len(going_on) < self.beams:
                going_on.append((tokens, total))
                parents.append(parent)
        self.open = going_on
        return parents

    def _end(self, tokens: list[int], logprob: float, *, finished: bool) -> None:
        score = logprob / len(tokens) ** self.length_penalty
        self.ended.append(Hypothesis(tokens, logprob, score, finished))
        self.ended.sort(key=lambda found: found.score, reverse=True)
        del self.ended[self.beams :]

    def _settled(self) -> bool:
        """Whether the best open beam, at its present length, is no better than the worst of a full list."""
        tokens, logprob = self.open[0]
        possible = logprob / len(tokens) ** self.length_penalty
        return len(self.ended) == self.beams and possible <= self.ended[-1].score
