"""Adapters cache values derived from weights while no weight changes, and discard them afterwards."""

import pytest
import torch

import whet
from whet.adapters.adapter import constant_weights, named_adapters
from whet.adapters.layers.lora_linear import LoRALinear
from whet.generation.beam_search import beam_search
from whet.generation.engine import generate_tokens

PROMPTS = [[5, 6, 7, 8], [9, 10]]


def with_adapters(tiny, variant):
    model = tiny[0]
    torch.manual_seed(0)
    whet.attach_lora(model, rank=4, variant=variant)
    randomize(model, 1)
    return model


def randomize(model, seed):
    torch.manual_seed(seed)
    for _, layer in named_adapters(model):
        torch.nn.init.normal_(layer.lora_B, std=0.3)


def tokens(model):
    return generate_tokens(model, PROMPTS, max_tokens=12, stop_tokens=set())


def greedy_without_cache(model):
    """Return greedy tokens computed without any cache."""
    completions = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([row]))
            row.append(int(logits[0, -1].argmax()))
        completions.append(row[len(prompt) :])
    return completions


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
def test_generation_uses_weights_changed_since_the_last_one(tiny, variant):
    model = with_adapters(tiny, variant)
    before = tokens(model)
    assert before == greedy_without_cache(model)
    randomize(model, 2)
    after = tokens(model)
    assert after == greedy_without_cache(model)
    assert after != before


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
@pytest.mark.parametrize(
    "generate",
    [tokens, lambda model: beam_search(model, PROMPTS[0], beams=2, max_tokens=5, stop_tokens=set())],
)
def test_operands_are_computed_once_per_generation(tiny, variant, generate, monkeypatch):
    model = with_adapters(tiny, variant)
    calls = []
    operands = LoRALinear.operands
    monkeypatch.setattr(LoRALinear, "operands", lambda layer: (calls.append(layer), operands(layer))[1])
    generate(model)
    assert sorted(map(id, calls)) == sorted(id(layer) for _, layer in named_adapters(model))
    assert all(layer.weight_cache is None for _, layer in named_adapters(model))


def test_nested_blocks_share_the_cache(tiny):
    model = with_adapters(tiny, "lora")
    layer = next(module for _, module in named_adapters(model))
    with constant_weights(model):
        value = layer.cached("x", object)
        with constant_weights(model):
            assert layer.cached("x", object) is value
        assert layer.cached("x", object) is value
    assert layer.cached("x", object) is not layer.cached("x", object)


def test_gradients_are_unchanged_by_the_cache(tiny):
    model = with_adapters(tiny, "dora")
    rows = torch.tensor([PROMPTS[0]])

    def gradients():
        model.zero_grad()
        model(rows).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    with constant_weights(model):
        with torch.no_grad():
            model(rows)  # fills the cache
        actual = gradients()
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_sharded_models_cache_nothing(tiny):
    model = with_adapters(tiny, "lora")
    model.unshard = lambda: None
    with constant_weights(model):
        assert all(layer.weight_cache is None for _, layer in named_adapters(model))
