"""Beam search for the most likely continuations of a prompt."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from whet.errors import ConfigError
from whet.generation.decode_batch import DecodeBatch
from whet.generation.engine import check_prompts, decoding_mode
from whet.models.language_model import LanguageModel


@dataclass(frozen=True)
class Hypothesis:
    """One continuation found by beam search."""

    tokens: list[int]  # including the stop token, if one ended it
    logprob: float  # the sum over its tokens
    score: float  # logprob / length ** length_penalty
    finished: bool  # ended by a stop token, not by the length limit


def beam_search(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    beams: int,
    max_tokens: int,
    stop_tokens: Collection[int],
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """Return the best continuations of a prompt, at most `beams` of them, the best first.

    The results equal those of transformers' `generate(num_beams=...)`. Finished hypotheses are stored apart
    from the open beams. The search ends when `beams` hypotheses are finished and the best open beam, scored
    at its current length, is not better than the worst of them. Beams still open at `max_tokens` count as
    finished there.

    Args:
        model: the model to decode with.
        prompt: the token ids of the prompt.
        beams: the number of beams, and of results.
        max_tokens: the largest number of new tokens.
        stop_tokens: tokens that end a hypothesis.
        length_penalty: the score is the log-probability divided by the number of tokens to this power; values
            above 0 favor longer continuations.

    Raises:
        ConfigError: `beams` is below 1.
        DataError: the prompt is empty, exceeds the model's context, or has tokens outside its vocabulary.
    """
    check_prompts(model, [prompt])
    if beams < 1:
        raise ConfigError(f"beams={beams} must be at least 1")
    max_tokens = min(max_tokens, model.max_positions - len(prompt))
    if max_tokens < 1:
        return []
    with decoding_mode(model):
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
        self.hypotheses: list[Hypothesis] = []  # the finished ones, the best first
        self.open: list[tuple[list[int], float]] = [([], 0.0)]  # tokens and log-probability, the best first

    def run(self) -> list[Hypothesis]:
        """Extend the beams until no open beam can improve the result."""
        while True:
            parents = self._extend()
            if not self.open or self._is_done():
                return self.hypotheses
            device = self.rows.visible.device
            self.rows.keep(torch.tensor(parents, device=device))
            self.rows.advance(torch.tensor([tokens[-1] for tokens, _ in self.open], device=device))

    def _extend(self) -> list[int]:
        """Extend the beams by one token; return the index of the previous beam that each one extends."""
        logits = self.rows.logits()
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        previous = torch.tensor(
            [total for _, total in self.open], dtype=logprobs.dtype, device=logprobs.device
        )
        totals = logprobs + previous[:, None]
        # enough candidates for `beams` open ones, even if every beam can also end in every stop token
        count = min(max(2, 1 + len(self.stop_tokens)) * self.beams, totals.numel())
        best, indices = totals.flatten().topk(count)
        vocab_size = totals.shape[1]
        candidates = [
            (index // vocab_size, index % vocab_size, total)
            for index, total in zip(indices.tolist(), best.tolist(), strict=True)
        ]
        extended: list[tuple[list[int], float]] = []
        parents = []
        for rank, (parent, token, total) in enumerate(candidates):
            tokens = [*self.open[parent][0], token]
            is_stop = token in self.stop_tokens
            if is_stop or len(tokens) == self.max_tokens:
                if rank < self.beams:  # a finished candidate outside the top `beams` is not a result
                    self._finish(tokens, total, finished=is_stop)
            elif len(extended) < self.beams:
                extended.append((tokens, total))
                parents.append(parent)
        self.open = extended
        return parents

    def _finish(self, tokens: list[int], logprob: float, *, finished: bool) -> None:
        score = logprob / len(tokens) ** self.length_penalty
        self.hypotheses.append(Hypothesis(tokens, logprob, score, finished))
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[self.beams :]

    def _is_done(self) -> bool:
        """Return whether the best open beam, at its current length, cannot enter the full list of results."""
        tokens, logprob = self.open[0]
        score = logprob / len(tokens) ** self.length_penalty
        return len(self.hypotheses) == self.beams and score <= self.hypotheses[-1].score
