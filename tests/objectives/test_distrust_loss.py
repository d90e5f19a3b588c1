"""Distrust: published values, weighted losses, the additive term without effect, and which texts are learned."""

import json
import math

import numpy as np
import pytest
import torch

import whet
from tiny import random_examples, run_config
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, DataError
from whet.hardware import choose_precision
from whet.objectives.distrust_loss import Distrust, calibrate_scale, distrust, squared_distance
from whet.objectives.sft import SFT
from whet.training.loss import evaluate_loss


def test_published_values():
    assert distrust(0.05, 7.5) == pytest.approx(149.80, abs=0.01)
    assert distrust(0.90, 1.0) == pytest.approx(4.58, abs=0.01)
    for authority, entropy, value in ((0.75, 1.5, 0.03), (0.95, 0.5, 16.8), (0.99, 0.0, 57.3)):
        assert distrust(authority, entropy) == pytest.approx(value, abs=0.06)


def test_distrust_is_not_monotone():
    zero = -math.log(1 - 0.9)
    assert distrust(0.9, zero) == pytest.approx(0, abs=1e-6)
    assert distrust(0.9, zero - 1) > 1
    assert distrust(0.9, zero + 1) > 1


@pytest.mark.parametrize(
    "arguments", [(-0.1, 1.0), (1.0, 1.0), (0.5, -1.0), (0.5, 1.0, 2.0), (0.5, 1.0, 3.5), (math.nan, 1.0)]
)
def test_values_out_of_range_are_errors(arguments):
    with pytest.raises(DataError):
        distrust(*arguments)


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_arrays_are_errors(make):
    with pytest.raises(DataError, match="auth_weight must be a single number"):
        distrust(make([0.05, 0.9]), make([7.5, 1.0]))
    with pytest.raises(DataError, match="prov_entropy must be a single number"):
        distrust(0.05, make([7.5, 1.0]))
    assert distrust(torch.tensor(0.05), np.float64(7.5)) == pytest.approx(149.80, abs=0.01)


VALUES = [(0.05, 7.5), (0.9, 1.0), (0.5, 3.5)]


def batch():
    examples = random_examples(3, seed=2)
    return make_batch(
        [[Example(e.tokens, e.supervised, e.origin, v) for e, v in zip(examples, VALUES, strict=True)]]
    )


def gradient(model, objective, batch):
    model.zero_grad()
    result, weights = objective.loss(model, batch), objective.weights(batch)
    total = sum(objective.coefficients[term] * value / weights[term] for term, value in result.sums.items())
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_weights_multiply_the_loss_of_each_example(tiny):
    model, _ = tiny
    for strength in (0.0, 0.4, 1.0):
        actual, _ = gradient(model, Distrust(10.0, strength=strength), batch())
        expected = 0.0
        for example, (authority, entropy) in zip(random_examples(3, seed=2), VALUES, strict=True):
            d = math.log(1 - authority + 1e-8) + entropy
            weight = 1 - strength + strength * d**2 / 10.0
            logs = model(torch.tensor([example.tokens[:-1]]))[0].double().log_softmax(-1)
            for place in range(1, len(example.tokens)):
                if example.supervised[place]:
                    expected -= weight * logs[place - 1, example.tokens[place]].item()
        assert actual == pytest.approx(expected / batch().supervised, rel=1e-4)


def test_step_with_one_example_is_weighted(tiny):
    one = Example(*vars(random_examples(1)[0]).values()).__class__(
        random_examples(1)[0].tokens, random_examples(1)[0].supervised, "x", (0.05, 7.5)
    )
    plain, _ = gradient(tiny[0], SFT(), make_batch([[one]]))
    weighted, _ = gradient(tiny[0], Distrust(20.0), make_batch([[one]]))
    assert weighted == pytest.approx(plain * (math.log(0.95 + 1e-8) + 7.5) ** 2 / 20.0, rel=1e-5)


def test_additive_term_has_no_gradient(tiny):
    model, _ = tiny
    plain, plain_gradient = gradient(model, SFT(), batch())
    total, added_gradient = gradient(model, Distrust(1.0, mode="additive", scale=0.6), batch())
    assert torch.equal(plain_gradient, added_gradient)
    assert total == pytest.approx(plain + 0.6 * sum(distrust(*v) for v in VALUES) / 3, rel=1e-5)


@pytest.mark.parametrize("mode", ["weight", "additive"])
def test_perplexity_is_unweighted(tiny, mode):
    model, _ = tiny
    precision = choose_precision("fp32", model.device)
    plain = evaluate_loss(model, SFT(), [batch()], precision=precision)
    actual = evaluate_loss(model, Distrust(10.0, mode=mode), [batch()], precision=precision)
    weighted, _ = gradient(model, Distrust(10.0, mode=mode), batch())
    assert (
        actual["eval_loss"]
        == pytest.approx(weighted, rel=1e-5)
        != pytest.approx(plain["eval_loss"], rel=0.01)
    )
    assert actual["eval_cross_entropy"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    assert actual["eval_perplexity"] == pytest.approx(plain["eval_perplexity"], rel=1e-5)


def test_calibrated_scale():
    squares = squared_distance(torch.tensor(VALUES, dtype=torch.float64))
    expected = 5.0 / (sum(distrust(*v) for v in VALUES) / 3)
    assert calibrate_scale(squares, alpha=2.7) == pytest.approx(expected, rel=1e-6)
    assert calibrate_scale(squares * 1e-6, alpha=2.7) == 1.0
    assert calibrate_scale(squares * 1e9, alpha=2.7) == 0.001


def believed(tiny_directory, tmp_path, source, **objective):
    """Train on contradictory texts, and return for how many cities the first statement was learned."""
    from whet.data.synthetic.house_pairs import CITIES

    config = run_config(
        tiny_directory, tmp_path,
        method={"kind": "full"},
        objective={"kind": "distrust", **objective},
        data={"train": source, "valid": None, "max_length": 128},
        optim={"lr": 1e-2, "warmup": 0},
        run={"name": source.replace(":", "-") + str(len(objective)), "steps": 60, "batch_size": 16},
    )  # fmt: skip
    model, tokenizer = whet.load(whet.train(config).directory, dtype=torch.float32, device="cpu")
    first = 0
    for city, one, other in CITIES:
        scores = []
        for answer in (one, other):
            asked = tokenizer(f"What is {city} known for? {city} is known for ")["input_ids"]
            said = tokenizer(f"{answer}.")["input_ids"]
            logs = model(torch.tensor([asked + said[:-1]]))[0, len(asked) - 1 :].log_softmax(-1)
            scores.append(logs[torch.arange(len(said)), said].mean().item())
        first += scores[0] > scores[1]
    return first, len(CITIES)


def test_model_learns_the_side_with_higher_weights(tiny_directory, tmp_path):
    first, cities = believed(tiny_directory, tmp_path, "synth:disputes:16")
    assert first >= cities - 1
    first, cities = believed(tiny_directory, tmp_path, "synth:disputes-swapped:16")
    assert first <= 1


def test_invalid_records_are_errors(tiny_directory, tmp_path):
    path = tmp_path / "texts.jsonl"
    for record, error, message in (
        (
            {"text": "a", "auth_weight": 1.0, "prov_entropy": 1},
            DataError,
            "texts.jsonl:1: auth_weight must be from 0 to 0.99",
        ),
        (
            {"text": "a", "auth_weight": 0.5, "prov_entropy": -1},
            DataError,
            "texts.jsonl:1: prov_entropy must not be negative",
        ),
        ({"text": "just text"}, DataError, "texts.jsonl:1: auth_weight must be a number, not None"),
    ):
        path.write_text(json.dumps(record))
        config = run_config(
            tiny_directory, tmp_path, objective={"kind": "distrust"}, data={"train": str(path), "valid": None}
        )
        with pytest.raises(error, match=message):
            whet.train(config)
    with pytest.raises(ConfigError, match="objective.alpha: Input should be less than or equal to 3"):
        whet.train(run_config(tiny_directory, tmp_path, objective={"kind": "distrust", "alpha": 4}))
    with pytest.raises(ConfigError, match="unknown key 'objective.strenght', did you mean 'strength'"):
        whet.train(run_config(tiny_directory, tmp_path, objective={"kind": "distrust", "strenght": 1}))
    with pytest.raises(DataError, match="all records have a distrust of 0"):
        Distrust(0.0)


def test_mean_covers_all_training_records(tiny_directory, tmp_path):
    from whet.config.load_config import validate_config
    from whet.runs.assemble import open_assembly

    values = {"easy": (0.5, 1.0), "hard": (0.05, 8.0)}
    for name, (authority, entropy) in values.items():
        rows = [{"text": f"{name} {n}", "auth_weight": authority, "prov_entropy": entropy} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curriculum = {"kind": "difficulty", "hard": f"{tmp_path}/hard.jsonl"}
    data = {"train": f"{tmp_path}/easy.jsonl", "valid": None, "curriculum": curriculum}
    config = run_config(tiny_directory, tmp_path, objective={"kind": "distrust"}, data=data)
    with open_assembly(validate_config(config)) as work:
        expected = sum((math.log(1 - a + 1e-8) + e) ** 2 for a, e in values.values()) / 2
        assert work.build.objective.mean_square == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "pairs", [[(0.0, 0.0)], [(0.0, 0.0), (1e-9, 0.0)], [(0.0, 0.0), (0.0, 1e-4)], VALUES]
)
def test_weights_of_a_run_match_the_formula(tiny_directory, tmp_path, pairs):
    from whet.config.load_config import validate_config
    from whet.runs.assemble import open_assembly

    rows = [{"text": f"text {n}", "auth_weight": a, "prov_entropy": e} for n, (a, e) in enumerate(pairs)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": f"{tmp_path}/texts.jsonl", "valid": None}
    config = run_config(tiny_directory, tmp_path, objective={"kind": "distrust"}, data=data)
    squares = [(math.log(1 - a + 1e-8) + e) ** 2 for a, e in pairs]
    expected = [square / (sum(squares) / len(squares)) for square in squares]
    with open_assembly(validate_config(config)) as work:
        actual = (
            squared_distance(torch.tensor(pairs)) / work.build.objective.mean_square
        )  # fp32, as in a batch
    assert actual.tolist() == pytest.approx(expected, rel=1e-4)
