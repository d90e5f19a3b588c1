"""Decoding steps of fixed shapes, as CUDA graphs capture them, produce the tokens of the growing cache."""

import pytest
import torch

import whet
from tiny import random_examples, write_tiny_model
from whet.adapters.adapter import named_adapters
from whet.generation import cuda_graph, decode_batch
from whet.generation.engine import complete, generate_tokens
from whet.generation.sampling import Sampling

PROMPTS = [example.tokens for example in random_examples(6, seed=1, shortest=2, longest=30)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
]


def decode(model, *, max_tokens=30, stop_tokens=range(0, 260, 12), **settings):
    return complete(
        model, PROMPTS, max_tokens=max_tokens, stop_tokens=stop_tokens, seeds=range(6), **settings
    )


def assert_same_completions(ours, theirs):
    assert [row.tokens for row in ours] == [row.tokens for row in theirs]
    assert [row.finished for row in ours] == [row.finished for row in theirs]
    for ours_row, theirs_row in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(ours_row.logprobs), torch.tensor(theirs_row.logprobs))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_static_steps_equal_growing_batch(tiny, sampling, request):
    model, _ = tiny
    growing = decode(model, sampling=sampling)
    assert len({len(row.tokens) for row in growing}) > 2, "rows end at different times"
    request.getfixturevalue("static_steps")
    assert_same_completions(decode(model, sampling=sampling), growing)


@pytest.mark.usefixtures("static_steps")
def test_full_cache_grows(tiny, monkeypatch):
    model, _ = tiny
    expected = decode(model, max_tokens=100, stop_tokens=set())
    monkeypatch.setattr(decode_batch, "_MAX_RESERVED", 1)
    monkeypatch.setattr(decode_batch, "_BLOCK", 4)
    growths = []
    original = cuda_graph.StaticDecodeBatch._grow_cache
    monkeypatch.setattr(
        cuda_graph.StaticDecodeBatch, "_grow_cache", lambda self: (growths.append(1), original(self))
    )
    assert_same_completions(decode(model, max_tokens=100, stop_tokens=set()), expected)
    assert len(growths) > 1


@pytest.mark.usefixtures("static_steps")
def test_steps_keep_shapes_and_addresses(tiny, monkeypatch):
    """What a CUDA graph needs: every step works on the assert_same_completions memory."""
    seen = set()
    original = cuda_graph.StaticDecodeBatch.step

    def step(self):
        original(self)
        tensors = (self._visible, self._slots, self._position, self._token, self._tokens, self._slot)
        stores = (*self.cache._keys, *self.cache._values, self.sampler.keys, self.sampler.count)
        seen.add(tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in (*tensors, *stores)))

    monkeypatch.setattr(cuda_graph.StaticDecodeBatch, "step", step)
    decode(tiny[0], stop_tokens=set(), sampling=Sampling(temperature=1.0))
    assert len(seen) == 1


@pytest.mark.usefixtures("static_steps")
def test_rows_stop_at_context_limit(tmp_path):
    write_tiny_model(tmp_path, max_position_embeddings=32)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    completions = generate_tokens(model, [[1] * 10, [2] * 28], max_tokens=50, stop_tokens=set())
    assert [len(tokens) for tokens in completions] == [22, 4]


@pytest.mark.usefixtures("static_steps")
def test_watcher_sees_every_token_and_can_end_a_row(tiny):
    seen = []

    def watch(row, tokens):
        seen.append((row, len(tokens)))
        return row != 2 or len(tokens) < 3

    completions = complete(tiny[0], PROMPTS, max_tokens=10, stop_tokens=set(), watch=watch)
    assert [len(row.tokens) for row in completions] == [10, 10, 3, 10, 10, 10]
    assert seen == [(row, step) for step in range(1, 11) for row in range(6) if row != 2 or step <= 3]


@pytest.mark.parametrize("steps", ["growing", "static"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_adapters_attached_merged_and_uncached_agree(tiny, variant, steps, request):
    if steps == "static":
        request.getfixturevalue("static_steps")
    model, _ = tiny
    whet.attach_lora(model, rank=4, variant=variant)
    torch.manual_seed(1)
    for _, layer in named_adapters(model):
        torch.nn.init.normal_(layer.lora_B, std=0.2)
    attached = generate_tokens(model, PROMPTS, max_tokens=12, stop_tokens=set())
    with whet.adapters_off(model):
        assert generate_tokens(model, PROMPTS, max_tokens=12, stop_tokens=set()) != attached
    for prompt, completions in zip(PROMPTS, attached, strict=True):
        row = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                row.append(model(torch.tensor([row]))[0, -1].argmax().item())
        assert row[len(prompt) :] == completions
    assert generate_tokens(whet.merge(model), PROMPTS, max_tokens=12, stop_tokens=set()) == attached


def test_cuda_graphs_need_cuda(tiny):
    model, _ = tiny
    assert (
        cuda_graph.graph_unsupported_reason(model, model.new_cache())
        == "CUDA graphs are not available on cpu"
    )
