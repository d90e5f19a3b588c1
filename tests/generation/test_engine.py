"""Batched decoding with a cache equals decoding without one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StableLmConfig, StableLmForCausalLM

import whet
from tiny import random_examples
from whet.errors import DataError
from whet.generation.engine import complete, generate_tokens
from whet.generation.sampling import Sampling
from whet.models.transformers_bridge import Bridge


def prompts(count=5, shared_tokens=0):
    start = list(range(shared_tokens))
    return [start + example.tokens for example in random_examples(count, seed=1, shortest=2, longest=30)]


def decode_without_cache(model, prompt, steps):
    """Greedy decoding by full forward passes."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shared_tokens", [0, 12])
def test_cached_batched_decoding_equals_full_forwards(tiny, shared_tokens):
    model, _ = tiny
    batch = prompts(shared_tokens=shared_tokens)
    completions = generate_tokens(model, batch, max_tokens=45, stop_tokens=set())
    assert completions == [decode_without_cache(model, prompt, 45) for prompt in batch]


def test_greedy_tokens_equal_transformers(tiny, tiny_directory):
    model, _ = tiny
    reference = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    for prompt in prompts(3):
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        ours = generate_tokens(model, [prompt], max_tokens=20, stop_tokens=set())
        assert ours[0] == theirs[0, len(prompt) :].tolist()


def test_bridge_decodes_ragged_batches_like_full_forwards(tmp_path):
    torch.manual_seed(0)
    settings = StableLmConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    StableLmForCausalLM(settings).save_pretrained(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Bridge)
    for shared_tokens in (0, 12):
        batch = prompts(shared_tokens=shared_tokens)
        assert generate_tokens(model, batch, max_tokens=12, stop_tokens=set()) == [
            decode_without_cache(model, prompt, 12) for prompt in batch
        ]


def test_stop_token_ends_only_its_row_and_is_excluded(tiny):
    model, _ = tiny
    batch = prompts()
    unstopped = generate_tokens(model, batch, max_tokens=20, stop_tokens=set())
    stop = unstopped[0][7]
    completions = generate_tokens(model, batch, max_tokens=20, stop_tokens={stop})
    for row, tokens in enumerate(unstopped):
        expected = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert completions[row] == expected


def test_watcher_can_end_a_row(tiny):
    model, _ = tiny
    unstopped = generate_tokens(model, prompts(), max_tokens=10, stop_tokens=set())
    completions = generate_tokens(
        model,
        prompts(),
        max_tokens=10,
        stop_tokens=set(),
        watch=lambda row, tokens: row != 2 or len(tokens) < 3,
    )
    assert completions == [tokens if row != 2 else tokens[:3] for row, tokens in enumerate(unstopped)]


def test_sampling_is_seeded_per_row(tiny):
    model, _ = tiny
    settings = {"max_tokens": 15, "stop_tokens": set(), "sampling": Sampling(temperature=1.0, top_k=50)}
    batch = prompts()
    first = generate_tokens(model, batch, seed=5, **settings)
    assert generate_tokens(model, batch, seed=5, **settings) == first
    assert generate_tokens(model, batch, seed=6, **settings) != first
    assert generate_tokens(model, batch[:1], seed=5, **settings) == first[:1]


def test_generation_restores_the_model(tiny):
    model, _ = tiny
    model.train()
    generate_tokens(model, prompts(2), max_tokens=3, stop_tokens=set())
    assert model.training
    model.hidden(torch.arange(5)[None]).sum().backward()  # fails if an inference-mode tensor remains


def test_context_limit(tmp_path):
    from tiny import write_tiny_model

    write_tiny_model(tmp_path, max_position_embeddings=16)
    model, _ = whet.load(tmp_path, device="cpu")
    [tokens] = generate_tokens(model, [[1] * 10], max_tokens=50, stop_tokens=set())
    assert len(tokens) == 6
    with pytest.raises(DataError, match="a prompt of 16 tokens leaves no room"):
        generate_tokens(model, [[1] * 16], max_tokens=5, stop_tokens=set())


def test_invalid_prompts_are_rejected(tiny):
    with pytest.raises(DataError, match="empty prompt"):
        generate_tokens(tiny[0], [[1], []], max_tokens=5, stop_tokens=set())
    with pytest.raises(DataError, match="token -1 is outside"):
        generate_tokens(tiny[0], [[1, -1]], max_tokens=5, stop_tokens=set())
    with pytest.raises(DataError, match="token 300 is outside the model's vocabulary of 260"):
        generate_tokens(tiny[0], [[300]], max_tokens=5, stop_tokens=set())


def test_logprobs_equal_full_forward_including_stop_token(tiny):
    model, _ = tiny
    batch = prompts()
    unstopped = generate_tokens(model, batch, max_tokens=20, stop_tokens=set())
    stop = unstopped[0][7]
    settings = {"max_tokens": 20, "stop_tokens": {stop}}
    warm = Sampling(temperature=1.3, top_k=30, top_p=0.9, repetition_penalty=1.2)
    for sampling in (None, warm):
        completions = complete(model, batch, sampling=sampling, seeds=range(5), **settings)
        for prompt, row in zip(batch, completions, strict=True):
            assert row.finished == (row.tokens[-1] == stop)
            assert stop not in row.tokens[:-1]
            with torch.no_grad():
                logits = model.double()(torch.tensor([prompt + row.tokens]))[0, len(prompt) - 1 : -1]
            model.float()
            expected = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row.logprobs).double(), expected, rtol=0, atol=2e-4)
    assert any(row.finished for row in complete(model, batch, **settings))


def test_finished_flag(tiny):
    model, _ = tiny
    completions = complete(
        model,
        prompts(),
        max_tokens=5,
        stop_tokens=set(),
        watch=lambda row, tokens: row != 2 or len(tokens) < 5,
    )
    assert [row.finished for row in completions] == [False, False, True, False, False]
    assert all(len(row.tokens) == len(row.logprobs) == 5 for row in completions)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_the_batch(tiny, temperature):
    """In float64, where the two best candidates never differ by rounding only."""
    model = tiny[0].double()
    batch = prompts(9)
    settings = {
        "max_tokens": 16,
        "stop_tokens": {7},
        "sampling": Sampling(temperature, repetition_penalty=1.1),
    }
    alone = [complete(model, [prompt], seeds=[row], **settings)[0] for row, prompt in enumerate(batch)]
    for rows in ([0, 1, 2], [4, 3], list(range(9)), list(range(8, -1, -1)), [5, 5, 5, 6]):
        completions = complete(model, [batch[row] for row in rows], seeds=rows, **settings)
        assert [row.tokens for row in completions] == [alone[row].tokens for row in rows]


def test_equal_prompts_are_prefilled_once_and_differ_by_seed(tiny, monkeypatch):
    model, _ = tiny
    read = []
    original = model.hidden
    monkeypatch.setattr(
        model,
        "hidden",
        lambda tokens, *rest: (read.append(tuple(tokens.shape)), original(tokens, *rest))[1],
    )
    completions = complete(
        model,
        [list(range(10))] * 4,
        max_tokens=3,
        stop_tokens=set(),
        sampling=Sampling(temperature=2.0),
        seeds=[1, 2, 3, 1],
    )
    assert completions[0] == completions[3]
    assert len({tuple(row.tokens) for row in completions}) == 3
    assert read == [(1, 10), (4, 1), (4, 1)]


def test_wrong_seed_count_is_rejected(tiny):
    with pytest.raises(DataError, match="2 seeds for 3 prompts"):
        complete(tiny[0], [[1]] * 3, max_tokens=2, stop_tokens=set(), seeds=[1, 2])


SMALL = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# a sliding window, ALiBi slopes, a state and a convolution: none may count padding after a shared prefix
POSITION_DEPENDENT = {
    "olmo3": {**SMALL, "sliding_window": 6},
    "mpt": {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "mamba": {**SMALL, "state_size": 8, "time_step_rank": 4},
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("kind", POSITION_DEPENDENT)
def test_bridge_rows_with_shared_prefix_decode_as_alone(kind, tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **POSITION_DEPENDENT[kind]))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    theirs.save_pretrained(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Bridge)
    start = list(range(3, 15))
    rows = [[*start, 40, 41], [*start, 50, 51, 52, 53, 54, 55, 56]]
    batched = complete(model, rows, max_tokens=6, stop_tokens=set())
    for row, completions in zip(rows, batched, strict=True):
        [alone] = complete(model, [row], max_tokens=6, stop_tokens=set())
        assert completions.tokens == alone.tokens
        assert completions.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
