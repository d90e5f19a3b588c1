"""Log-likelihoods of continuations equal those of transformers, computed one pair at a time."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from whet.evaluation import loglikelihood
from whet.evaluation.loglikelihood import score_continuations
from whet.models.decoder import Decoder


def make_pairs(*, seed=0, items=6, choices=4):
    """Return multiple-choice pairs: one context per item, and continuations of various lengths."""
    rng = random.Random(seed)
    shots = [rng.randrange(256) for _ in range(40)]  # examples that all prompts begin with
    pairs = []
    for _ in range(items):
        context = [*shots, *(rng.randrange(256) for _ in range(rng.randint(1, 60)))]
        lengths = [1, 1, *(rng.randint(2, 20) for _ in range(choices - 2))]
        pairs += [(context, [rng.randrange(256) for _ in range(length)]) for length in lengths]
    return pairs


def reference_score(model, context, continuation, limit):
    """Return the log-likelihood and the greedy flag of one pair, from transformers' full logits."""
    tokens = torch.tensor([*context, *continuation][-(limit + 1) :])
    logits = model(tokens[None, :-1]).logits[0, -len(continuation) :]
    targets = tokens[-len(continuation) :]
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(logprobs.sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("limit", [512, 50])
def test_scores_equal_transformers(tiny, tiny_directory, limit):
    model, _ = tiny
    reference = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()
    pairs = make_pairs()
    context = pairs[0][0]
    with torch.no_grad():  # a greedy continuation, so that both values of the flag occur
        greedy = int(reference(torch.tensor([context[-limit:]])).logits[0, -1].argmax())
    pairs.append((context, [greedy]))
    scores = score_continuations(model, pairs, max_length=limit)
    with torch.no_grad():
        expected = [reference_score(reference, *pair, limit) for pair in pairs]
    assert [score.is_greedy for score in scores] == [flag for _, flag in expected]
    assert scores[-1].is_greedy
    torch.testing.assert_close(
        [score.logprob for score in scores], [value for value, _ in expected], atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("row_tokens", [1, 100, 4096])
def test_scores_do_not_depend_on_the_rows(tiny, monkeypatch, row_tokens):
    model, _ = tiny
    pairs = make_pairs(seed=1)
    expected = score_continuations(model, pairs)
    monkeypatch.setattr(loglikelihood, "_CPU_ROW_TOKENS", row_tokens)
    counts = []
    scores = score_continuations(model, pairs, progress=lambda done, total: counts.append((done, total)))
    torch.testing.assert_close(
        [score.logprob for score in scores], [score.logprob for score in expected], atol=1e-4, rtol=1e-5
    )
    assert counts[-1] == (len(pairs), len(pairs))


def test_shared_contexts_are_computed_once(tiny, monkeypatch):
    model, _ = tiny
    computed = []
    original = Decoder._hidden

    def record(self, tokens, *arguments):
        computed.append(tokens.numel())
        return original(self, tokens, *arguments)

    monkeypatch.setattr(Decoder, "_hidden", record)
    pairs = make_pairs(items=3)
    score_continuations(model, pairs)
    inputs = {(*context, *continuation)[:-1] for context, continuation in pairs}
    shots, contexts = 40, sum(len(context) - 40 for context in {tuple(context) for context, _ in pairs})
    tails = sum(len(continuation) - 1 for _, continuation in pairs)
    assert sum(computed) <= shots + contexts + tails + 16 * len(inputs)  # short shared parts are repeated
    assert sum(computed) < 0.6 * sum(map(len, inputs))
