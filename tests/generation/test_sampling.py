"""Samples follow the filtered distribution, and depend on the seed of their row only."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from whet.errors import ConfigError
from whet.generation import sampling as sampling_module
from whet.generation.sampling import Sampling, TokenSampler, row_seeds


def token_sampler(sampling, rows, *, vocab, max_tokens=1, prompts=None):
    return TokenSampler(
        sampling,
        prompts or [[0]] * rows,
        row_seeds(rows, seed=0),
        max_tokens=max_tokens,
        vocab_size=vocab,
        device=torch.device("cpu"),
    )


def distribution(logits, sampling, draws=8_000):
    chosen, _ = token_sampler(sampling, draws, vocab=len(logits))(torch.tensor([logits]).expand(draws, -1))
    return torch.bincount(chosen, minlength=len(logits)) / draws


def test_draws_follow_the_filtered_distribution():
    logits = [2.0, 1.0, 0.0, -1.0]
    p = torch.tensor(logits).softmax(-1)
    torch.testing.assert_close(distribution(logits, Sampling(temperature=1.0)), p, rtol=0, atol=0.022)
    torch.testing.assert_close(
        distribution(logits, Sampling(temperature=2.0)),
        (torch.tensor(logits) / 2).softmax(-1),
        rtol=0,
        atol=0.022,
    )
    for sampling, count in (
        (Sampling(1.0, top_k=2), 2),
        (Sampling(1.0, top_p=0.8), 2),  # 0.64 is not enough, 0.64 + 0.24 is
        (Sampling(1.0, top_p=0.6), 1),
        (Sampling(1.0, min_p=0.1), 3),  # 0.644 * 0.1 = 0.064: the last one has 0.032
    ):
        expected = torch.where(torch.arange(4) < count, p, 0.0)
        torch.testing.assert_close(
            distribution(logits, sampling), expected / expected.sum(), rtol=0, atol=0.022
        )


def test_successive_draws_of_one_row_follow_the_distribution():
    """The draws of one seed over a large vocabulary pass a chi-square test."""
    vocab, draws = 200, 3_000
    logits = torch.linspace(0, 3, vocab)[None]
    sampler = token_sampler(Sampling(temperature=1.0), 1, vocab=vocab, max_tokens=draws)
    values = np.bincount([sampler(logits)[0].item() for _ in range(draws)], minlength=vocab)
    expected = draws * logits[0].softmax(-1).numpy()
    square = ((values - expected) ** 2 / expected).sum()
    assert abs(square - (vocab - 1)) < 5 * (2 * (vocab - 1)) ** 0.5
    # successive tokens are uncorrelated
    sampler.count.zero_()
    ids = np.array([sampler(logits)[0].item() for _ in range(draws)])
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / draws**0.5


def test_draws_do_not_depend_on_max_tokens():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    short, long = (token_sampler(Sampling(1.0), 3, vocab=200, max_tokens=count) for count in (5, 50))
    for _ in range(5):
        assert torch.equal(short(logits)[0], long(logits)[0])


def test_repetition_penalty_equals_transformers():
    torch.manual_seed(0)
    prompts = [[3, 5, 5, 9], [1, 2, 3, 4]]
    logits = torch.randn(2, 12)
    sampler = token_sampler(Sampling(repetition_penalty=1.7), 2, vocab=12, max_tokens=8, prompts=prompts)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)
    tokens = torch.tensor(prompts)
    for _ in range(8):
        chosen, logprobs = sampler(logits)
        expected = theirs(tokens, logits.clone()).argmax(-1)
        assert chosen.tolist() == expected.tolist()
        plain = logits.log_softmax(-1)[[0, 1], chosen]  # without the penalty
        torch.testing.assert_close(logprobs, plain)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.2},
        {"repetition_penalty": float("nan")},
    ],
)
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(ConfigError):
        Sampling(**settings)


def test_small_noise_values_are_exact(monkeypatch):
    monkeypatch.setattr(sampling_module, "_hash_", lambda bits: bits)
    bits = np.array([0, 1, 2, 40, 63, 64, 65, 1000, 2**31 - 1, 2**31], dtype=np.uint32)
    values = sampling_module._exponential_noise(
        torch.from_numpy(bits.view(np.int32)), torch.zeros(1, 1, dtype=torch.int32)
    )[0]
    expected = -np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(values.double().numpy(), expected, rtol=2e-6)
