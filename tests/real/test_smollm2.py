"""Tests with a real language model: SmolLM2-135M-Instruct, from the cache of `whet pull`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import whet
from whet.config.load_config import load_config
from whet.data.sources.source import open_source
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.generation.engine import generate_tokens
from whet.generation.generate import encode_prompt
from whet.models.decoder import Decoder
from whet.models.stop_tokens import stop_tokens
from whet.ops.cross_entropy import linear_cross_entropy

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def smollm2(smollm2_directory):
    return whet.load(NAME, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def reference(smollm2_directory):
    return AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokens(smollm2):
    text = "The knife was dull, so 12 stones and 3 oils were brought; by noon it cut paper. Naïve? 东京!"
    return torch.tensor([smollm2[1](text)["input_ids"]])


def test_pretrained_model_knows_the_capital_of_france(smollm2):
    assert "Paris" in whet.generate(*smollm2, "What is the capital of France?", max_tokens=12)


def test_logits_and_gradients_equal_transformers(smollm2, reference, tokens):
    model = smollm2[0]
    assert isinstance(model, Decoder)
    logits = reference(tokens[:, :-1]).logits
    error = (model(tokens[:, :-1]) - logits).abs().max().item()
    assert error < 2e-4
    targets = tokens[0, 1:]
    torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum").backward()
    linear_cross_entropy(model.hidden(tokens[:, :-1])[0], model.head(), targets).backward()
    theirs = dict(reference.named_parameters())
    squares = [0.0, 0.0]
    for name, parameter in model.named_parameters():
        expected = theirs[model.hf_name(name)].grad
        squares[0] += (parameter.grad - expected).double().square().sum().item()
        squares[1] += expected.double().square().sum().item()
    # relative L2 over all weights; in float32, transformers is 3e-5 from the float64 gradient and whet 5e-6
    assert (squares[0] / squares[1]) ** 0.5 < 1e-4
    model.zero_grad(set_to_none=True)
    reference.zero_grad(set_to_none=True)


def test_saved_model_computes_the_same_in_transformers(smollm2, tokens, tmp_path):
    whet.save(*smollm2, tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens).logits, smollm2[0](tokens), rtol=0, atol=2e-4)


@pytest.mark.parametrize("steps", ["growing", "static"])
def test_batched_greedy_answers_equal_transformers(smollm2, reference, steps, request):
    if steps == "static":
        request.getfixturevalue("static_steps")
    model, tokenizer = smollm2
    questions = ["What is the capital of France?", "Name three colours.", "Say hi."]
    prompts = [encode_prompt(tokenizer, text) for text in questions]
    batched = generate_tokens(model, prompts, max_tokens=16, stop_tokens=stop_tokens(model, tokenizer))
    for prompt, ours in zip(prompts, batched, strict=True):
        theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[
            0, len(prompt) :
        ]
        expected = [token for token in theirs.tolist() if token != tokenizer.eos_token_id]
        assert ours == expected


def test_a_few_demo_steps_reduce_the_loss(tmp_path, smollm2_directory):
    """Twelve of the demo's forty steps reduce the loss on unseen commands from 3 to under 0.5."""
    config = load_config(
        "examples/demo.yaml",
        [f"run.dir={tmp_path}", "run.steps=12", "run.device=cpu", "data.valid=synth:house-valid:12"],
    )
    result = whet.train(config)
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[0] > 2.5
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_demo_reaches_its_figures(tmp_path, smollm2_directory):
    """Exact match on 200 unseen commands: 0% before, at least 97% on known templates after."""
    source = open_source("synth:house-test:200")
    before = ModelEvaluation(*whet.load(NAME), source, max_length=512).exact_match(max_tokens=40)
    assert before["exact_match"] == 0
    result = whet.train(load_config("examples/demo.yaml", [f"run.dir={tmp_path}", "run.device=cpu"]))
    after = ModelEvaluation(*whet.load(result.directory), source, max_length=512).exact_match(max_tokens=40)
    assert after["exact_match_known"] >= 0.97
    assert after["exact_match_unseen"] >= 0.85
