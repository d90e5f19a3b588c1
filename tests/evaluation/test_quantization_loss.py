"""KL divergence and perplexity of two models, against float64 logits of transformers."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from tiny import write_tiny_model
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.quantization_loss import (
    EvaluationData,
    QuantizationLoss,
    first_batches,
    measure_quantization,
    sample_data,
)
from whet.evaluation.sample_text import SAMPLE_TEXT


@pytest.fixture(scope="module")
def pair(tiny_directory, tmp_path_factory):
    """Two different models with the same tokenizer."""
    other = tmp_path_factory.mktemp("pair") / "other"
    write_tiny_model(other, initializer_range=0.15)
    return tiny_directory, other


def load_both(pair):
    return [whet.load(directory, dtype=torch.float32, device="cpu")[0] for directory in pair]


def test_measurements_are_those_of_float64_logits(pair):
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    models = load_both(pair)
    loss = measure_quantization(*models, sample_data(models[0], tokenizer), tokenizer=tokenizer)
    theirs = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in pair]
    kl, nlls, count = 0.0, [0.0, 0.0], 0
    for text in SAMPLE_TEXT:
        tokens = torch.tensor([tokenizer(text)["input_ids"][:512]])
        with torch.no_grad():
            log_p, log_q = (model(tokens).logits[0, :-1].log_softmax(-1) for model in theirs)
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        for index, logprobs in enumerate((log_p, log_q)):
            nlls[index] -= logprobs.gather(1, tokens[0, 1:, None]).sum().item()
        count += tokens.shape[1] - 1
    assert loss.tokens == count
    assert loss.kl == pytest.approx(kl / count, rel=1e-4)
    assert loss.float_perplexity == pytest.approx(math.exp(nlls[0] / count), rel=1e-4)
    assert loss.perplexity == pytest.approx(math.exp(nlls[1] / count), rel=1e-4)
    assert loss.perplexity_increase == pytest.approx(math.exp((nlls[1] - nlls[0]) / count) - 1, rel=1e-3)
    same = measure_quantization(models[0], models[0], sample_data(models[0], tokenizer), tokenizer=tokenizer)
    assert same.kl == 0
    assert same.perplexity_increase == 0


def test_perplexity_and_exact_match_are_those_of_whet_evaluate(pair):
    from whet.data.sources.source import open_source

    models, tokenizer = load_both(pair), AutoTokenizer.from_pretrained(pair[0])
    evaluation = ModelEvaluation(models[0], tokenizer, open_source("synth:house-valid:6"), max_length=256)
    data = EvaluationData("house", evaluation.batches, evaluation.questions)
    loss = measure_quantization(*models, data, tokenizer=tokenizer, generate=True)
    expected = [
        whet.evaluate((each, tokenizer), "synth:house-valid:6", max_length=256, generate=True)
        for each in models
    ]
    assert loss.float_perplexity == pytest.approx(expected[0]["eval_perplexity"], rel=1e-4)
    assert loss.perplexity == pytest.approx(expected[1]["eval_perplexity"], rel=1e-4)
    assert loss.exact_match == expected[1]["exact_match"]
    assert loss.float_exact_match == expected[0]["exact_match"]


@pytest.mark.parametrize(
    ("measured", "bounds", "broken"),
    [
        ((0.01, 10.0, 10.5), (None, None), []),
        ((0.01, 10.0, 10.5), (0.01, 0.051), []),
        ((0.011, 10.0, 10.0), (0.01, None), ["KL divergence is 0.011, above the bound of 0.01"]),
        ((0.0, 10.0, 10.5), (0.0, 0.04), ["increase of the perplexity is 0.05, above the bound of 0.04"]),
        ((math.nan, 10.0, math.nan), (9.0, 9.0), ["KL divergence is nan", "perplexity is nan"]),
    ],
)
def test_bounds(measured, bounds, broken):
    sentences = QuantizationLoss("data", 1, *measured).broken_bounds(*bounds)
    assert len(sentences) == len(broken)
    assert all(expected in sentence for expected, sentence in zip(broken, sentences, strict=True))


def test_evaluation_is_limited_to_the_first_tokens():
    batches = [make_batch([[Example([1] * 11, [True] * 11, "x")]]) for _ in range(5)]
    assert first_batches(batches, 30) == batches[:3]
    assert first_batches(batches, 5) == batches[:1]
    assert first_batches(batches) == batches
