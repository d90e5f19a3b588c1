"""Decoding with a cache gives what decoding without one gives, whatever the batch."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import whet
from tiny import random_examples
from whet.errors import ConfigError, DataError
from whet.generation.engine import generate_tokens
from whet.generation.sampling import Sampling, row_generators, sample


def prompts(count=5, shared=0):
    start = list(range(shared))
    return [start + example.tokens for example in random_examples(count, seed=1, shortest=2, longest=30)]


def uncached(model, prompt, steps):
    """Greedy decoding by full forward passes."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shared", [0, 12])
def test_cached_batched_decoding_equals_full_forwards(tiny, shared):
    model, _ = tiny
    asked = prompts(shared=shared)
    found = generate_tokens(model, asked, max_tokens=45, stop_tokens=set())
    assert found == [uncached(model, prompt, 45) for prompt in asked]


def test_greedy_tokens_equal_transformers(tiny, tiny_directory):
    model, _ = tiny
    reference = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    for prompt in prompts(3):
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        ours = generate_tokens(model, [prompt], max_tokens=20, stop_tokens=set())
        assert ours[0] == theirs[0, len(prompt) :].tolist()


def test_the_bridge_decodes_ragged_batches_like_its_full_forward(tmp_path):
    torch.manual_seed(0)
    settings = MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=None, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    MistralForCausalLM(settings).save_pretrained(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    for shared in (0, 12):
        asked = prompts(shared=shared)
        assert generate_tokens(model, asked, max_tokens=12, stop_tokens=set()) == [
            uncached(model, prompt, 12) for prompt in asked
        ]


def test_stop_tokens_end_a_row_are_left_out_and_spare_the_others(tiny):
    model, _ = tiny
    asked = prompts()
    free = generate_tokens(model, asked, max_tokens=20, stop_tokens=set())
    stop = free[0][7]
    found = generate_tokens(model, asked, max_tokens=20, stop_tokens={stop})
    for row, tokens in enumerate(free):
        expected = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert found[row] == expected


def test_a_watcher_can_end_a_row(tiny):
    model, _ = tiny
    free = generate_tokens(model, prompts(), max_tokens=10, stop_tokens=set())
    found = generate_tokens(
        model,
        prompts(),
        max_tokens=10,
        stop_tokens=set(),
        watch=lambda row, tokens: row != 2 or len(tokens) < 3,
    )
    assert found == [tokens if row != 2 else tokens[:3] for row, tokens in enumerate(free)]


def test_sampling_is_seeded_and_rows_do_not_depend_on_their_neighbours(tiny):
    model, _ = tiny
    settings = {"max_tokens": 15, "stop_tokens": set(), "sampling": Sampling(temperature=1.0, top_k=50)}
    asked = prompts()
    first = generate_tokens(model, asked, seed=5, **settings)
    assert generate_tokens(model, asked, seed=5, **settings) == first
    assert generate_tokens(model, asked, seed=6, **settings) != first
    assert generate_tokens(model, asked[:1], seed=5, **settings) == first[:1]


def test_generation_leaves_the_model_as_it_was(tiny):
    model, _ = tiny
    model.train()
    generate_tokens(model, prompts(2), max_tokens=3, stop_tokens=set())
    assert model.training
    model.hidden(torch.arange(5)[None]).sum().backward()  # no inference-mode tensor was left behind


def test_the_context_is_never_exceeded(tmp_path):
    from tiny import write_tiny_model

    write_tiny_model(tmp_path, max_position_embeddings=16)
    model, _ = whet.load(tmp_path, device="cpu")
    [tokens] = generate_tokens(model, [[1] * 10], max_tokens=50, stop_tokens=set())
    assert len(tokens) == 6
    with pytest.raises(DataError, match="a prompt of 16 tokens leaves no room"):
        generate_tokens(model, [[1] * 16], max_tokens=5, stop_tokens=set())


def test_bad_prompts_are_refused(tiny):
    with pytest.raises(DataError, match="empty prompt"):
        generate_tokens(tiny[0], [[1], []], max_tokens=5, stop_tokens=set())
    with pytest.raises(DataError, match="token 300 is outside the model's vocabulary of 260"):
        generate_tokens(tiny[0], [[300]], max_tokens=5, stop_tokens=set())


def distribution(logits, sampling, draws=20_000):
    rows = torch.tensor([logits]).expand(draws, -1)
    generators = row_generators(1, seed=0) * draws
    return torch.bincount(sample(rows, sampling, generators), minlength=len(logits)) / draws


def test_draws_follow_the_filtered_distribution():
    logits = [2.0, 1.0, 0.0, -1.0]
    p = torch.tensor(logits).softmax(-1)
    torch.testing.assert_close(distribution(logits, Sampling(temperature=1.0)), p, rtol=0, atol=0.015)
    torch.testing.assert_close(
        distribution(logits, Sampling(temperature=2.0)),
        (torch.tensor(logits) / 2).softmax(-1),
        rtol=0,
        atol=0.015,
    )
    for sampling, kept in (
        (Sampling(1.0, top_k=2), 2),
        (Sampling(1.0, top_p=0.8), 2),  # 0.64 is not enough, 0.64 + 0.24 is
        (Sampling(1.0, top_p=0.6), 1),
        (Sampling(1.0, min_p=0.1), 3),  # 0.644 * 0.1 = 0.064: the last one has 0.032
    ):
        expected = torch.where(torch.arange(4) < kept, p, 0.0)
        torch.testing.assert_close(
            distribution(logits, sampling), expected / expected.sum(), rtol=0, atol=0.015
        )


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"top_k": -1}, {"min_p": 2}]
)
def test_bad_sampling_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Sampling(**bad)
