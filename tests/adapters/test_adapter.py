"""While no weight changes, what adapters make of theirs alone is made once; afterwards it is forgotten."""

import pytest
import torch

import whet
from whet.adapters.adapter import adapted, unchanging
from whet.adapters.layers.lora_linear import LoRALinear
from whet.generation.beam_search import beam_search
from whet.generation.engine import generate_tokens

PROMPTS = [[5, 6, 7, 8], [9, 10]]


def with_adapters(tiny, variant):
    model = tiny[0]
    torch.manual_seed(0)
    whet.attach_lora(model, rank=4, variant=variant)
    change(model, 1)
    return model


def change(model, seed):
    torch.manual_seed(seed)
    for _, layer in adapted(model):
        torch.nn.init.normal_(layer.lora_B, std=0.3)


def tokens(model):
    return generate_tokens(model, PROMPTS, max_tokens=12, stop_tokens=set())


def by_reading_again(model):
    """Greedy tokens without a cache or anything else that is kept."""
    found = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([row]))
            row.append(int(logits[0, -1].argmax()))
        found.append(row[len(prompt) :])
    return found


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
def test_weights_that_change_between_two_generations_are_used(tiny, variant):
    model = with_adapters(tiny, variant)
    before = tokens(model)
    assert before == by_reading_again(model)
    change(model, 2)
    after = tokens(model)
    assert after == by_reading_again(model)
    assert after != before


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
@pytest.mark.parametrize(
    "generate",
    [tokens, lambda model: beam_search(model, PROMPTS[0], beams=2, max_tokens=5, stop_tokens=set())],
)
def test_factors_are_made_once_a_generation(tiny, variant, generate, monkeypatch):
    model = with_adapters(tiny, variant)
    made = []
    operands = LoRALinear.operands
    monkeypatch.setattr(LoRALinear, "operands", lambda layer: (made.append(layer), operands(layer))[1])
    generate(model)
    assert sorted(map(id, made)) == sorted(id(layer) for _, layer in adapted(model))
    assert all(layer.lasting is None for _, layer in adapted(model))


def test_one_block_in_another_keeps_what_was_made(tiny):
    model = with_adapters(tiny, "lora")
    layer = next(module for _, module in adapted(model))
    with unchanging(model):
        kept = layer.once("x", object)
        with unchanging(model):
            assert layer.once("x", object) is kept
        assert layer.once("x", object) is kept
    assert layer.once("x", object) is not layer.once("x", object)


def test_gradients_flow_as_ever(tiny):
    model = with_adapters(tiny, "dora")
    rows = torch.tensor([PROMPTS[0]])

    def gradients():
        model.zero_grad()
        model(rows).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    with unchanging(model):
        with torch.no_grad():
            model(rows)  # makes what is kept
        found = gradients()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_ranks_that_hold_weights_in_parts_keep_nothing(tiny):
    model = with_adapters(tiny, "lora")
    model.unshard = lambda: None
    with unchanging(model):
        assert all(layer.lasting is None for _, layer in adapted(model))
