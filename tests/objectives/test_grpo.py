"""GRPO compared with float64 formulas, and its gradient for different micro-batches."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import whet
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, DataError
from whet.objectives.grpo import GRPO, GRPOConfig, advantages_of, completion_logprobs, grpo_loss
from whet.ops.lm_head import Head
from whet.training.trainer import Trainer

# the order of float32 sums differs between cuts: relative L2 over all gradients
TOLERANCE = 2e-6


def reference(new, old, advantages, mask, ref, *, low, high, beta, aggregation, max_tokens):
    """Return the loss and its gradient, computed token by token with Python floats."""
    rows, width = new.shape
    counts = [sum(mask[i]) for i in range(rows)]
    loss, gradient = 0.0, np.zeros((rows, width))
    for i, t in itertools.product(range(rows), range(width)):
        if not mask[i][t]:
            continue
        share = {
            "token": 1 / sum(counts),
            "sequence": 1 / counts[i] / sum(count > 0 for count in counts),
            "constant": 1 / (rows * max_tokens),
        }[aggregation]
        ratio, a = math.exp(new[i, t] - old[i, t]), advantages[i]
        clipped = min(max(ratio, 1 - low), 1 + high)
        each = -min(ratio * a, clipped * a)
        slope = -a * ratio if ratio * a <= clipped * a else 0.0
        if ref is not None:
            d = ref[i, t] - new[i, t]
            each += beta * (math.exp(d) - d - 1)
            slope += beta * (1 - math.exp(d))
        loss += share * each
        gradient[i, t] = share * slope
    return loss, gradient


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("beta", "high"), [(0.0, None), (0.3, None), (0.05, 0.5), (0.0, 0.28)])
def test_loss_and_gradient_match_the_formula(aggregation, beta, high):
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 1, (6, 9))
    new = old + rng.normal(0, 0.4, old.shape)  # clipped on both sides, and not
    ref = old + rng.normal(0, 0.4, old.shape) if beta else None
    mask = rng.random(old.shape) < 0.7
    mask[3] = False  # a completion that was left out
    advantages = rng.normal(0, 1, 6)
    expected, gradient = reference(
        new, old, advantages, mask, ref, low=0.2, high=0.2 if high is None else high, beta=beta,
        aggregation=aggregation, max_tokens=11,
    )  # fmt: skip
    logprobs = torch.tensor(new, requires_grad=True)
    actual = grpo_loss(
        logprobs,
        torch.where(torch.tensor(mask), torch.tensor(old), torch.nan),  # padding may hold anything
        torch.tensor(advantages),
        torch.tensor(mask),
        None if ref is None else torch.tensor(ref),
        epsilon_high=high,
        beta=beta,
        aggregation=aggregation,
        max_tokens=11,
    )
    actual.backward()
    assert actual.item() == pytest.approx(expected, rel=1e-12)
    assert np.allclose(logprobs.grad.numpy(), gradient, rtol=1e-10, atol=1e-14)


def test_kl_is_a_penalty_and_the_ratio_is_relative_to_the_sampler():
    """In lmxlab the KL term was a bonus; moving away from the reference model must increase the loss."""
    mask = torch.ones(1, 1)
    zero = torch.zeros(1, 1)
    away = grpo_loss(zero + 0.5, zero + 0.5, torch.zeros(1), mask, zero, beta=1.0)
    assert away > grpo_loss(zero, zero, torch.zeros(1), mask, zero, beta=1.0) == 0
    assert grpo_loss(zero, zero, torch.ones(1), mask, zero - 3, beta=0.0).item() == -1.0


def test_invalid_arguments_are_errors():
    values = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="needs the log-probabilities of a reference model"):
        grpo_loss(values, values, torch.zeros(2), values + 1, beta=0.1)
    with pytest.raises(ConfigError, match="needs max_tokens"):
        grpo_loss(values, values, torch.zeros(2), values + 1, aggregation="constant")
    with pytest.raises(DataError, match="the mask selects no tokens"):
        grpo_loss(values, values, torch.zeros(2), values)
    with pytest.raises(DataError, match="at least 2 completions per prompt, not 1"):
        advantages_of(torch.zeros(3, 1), "group")


def test_advantages_match_the_papers():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.3, 0.1, 0.7, 0.2], [0.1, 0.1, 0.1, 0.1]])
    actual = {
        kind: advantages_of(torch.tensor(rewards), kind).numpy()
        for kind in ("group", "dr_grpo", "rloo", "reinforce")
    }
    for i, j in itertools.product(range(2), range(4)):
        others = np.delete(rewards[i], j)
        assert actual["group"][i, j] == pytest.approx(
            (rewards[i, j] - rewards[i].mean()) / (rewards[i].std() + 1e-4)
        )
        assert actual["dr_grpo"][i, j] == pytest.approx(rewards[i, j] - rewards[i].mean())
        assert actual["rloo"][i, j] == pytest.approx(rewards[i, j] - others.mean())
        assert actual["reinforce"][i, j] == pytest.approx(rewards[i, j] - rewards.mean())
    for kind in ("group", "dr_grpo", "rloo"):  # 0.1 three times is no 0.1 in floats
        assert (actual[kind][2] == 0).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sample_standard_deviation_matches_trl(size):
    """TRL's formula in float64: (rewards - mean) / (std + 1e-4), where torch's std divides by n - 1."""
    rewards = torch.rand(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages_of(rewards, "group", std="sample"), theirs)
    usual = advantages_of(rewards, "group")
    assert usual.norm() / theirs.norm() == pytest.approx((size / (size - 1)) ** 0.5, rel=1e-3)


def test_tempered_head_divides_capped_logits():
    hidden, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    bias = torch.randn(11, dtype=torch.float64)
    for softcap in (None, 2.0):
        head = Head(weight, bias, scale=1.7, softcap=softcap)
        projected = hidden @ weight.T + bias
        assert torch.allclose(head.tempered(0.6).transform(projected), head.transform(projected) / 0.6)


def completions(count, *, seed=0):
    """Return examples of random tokens that end in completions, with random log-probabilities."""
    rng = random.Random(seed)
    actual = []
    for index in range(count):
        prompt, answer = rng.randint(1, 12), rng.randint(1, 15)
        tokens = [rng.randrange(260) for _ in range(prompt + answer)]
        marks = [False] * prompt + [True] * answer
        old = [rng.uniform(-7, -4) for _ in range(answer)]
        reference = [rng.uniform(-7, -4) for _ in range(answer)]
        actual.append((Example(tokens, marks, f"completion {index}"), old, reference, rng.gauss(0, 1)))
    return actual


def batch_of(rows, *, beta):
    """Return a batch of completions, as rollouts build it."""
    flat = [item for row in rows for item in row]
    batch = make_batch([[example for example, *_ in row] for row in rows]).with_columns(
        "token",
        old_logprobs=torch.tensor([value for _, old, _, _ in flat for value in old]),
        reference_logprobs=torch.tensor([v for _, _, ref, _ in flat for v in ref]) if beta else None,
    )
    return batch.with_columns(
        "document",
        advantages=torch.tensor([advantage for *_, advantage in flat]),
        lengths=torch.tensor([len(old) for _, old, _, _ in flat]),
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_objective_matches_the_loss_of_transformers_log_probabilities(tiny_directory, aggregation):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    items = completions(5)
    width = max(len(old) for _, old, _, _ in items)
    new, old, ref, mask = (torch.zeros(5, width, dtype=torch.float64) for _ in range(4))
    for row, (example, sampled, said, _) in enumerate(items):
        size = len(sampled)
        ids = torch.tensor([example.tokens])
        with torch.no_grad():
            logits = theirs(ids).logits[0, -size - 1 : -1].double() / 0.7
        new[row, :size] = logits.log_softmax(-1).gather(1, ids[0, -size:, None])[:, 0]
        old[row, :size], ref[row, :size], mask[row, :size] = torch.tensor(sampled), torch.tensor(said), 1
    advantages = torch.tensor([advantage for *_, advantage in items], dtype=torch.float64)
    expected = grpo_loss(
        new, old, advantages, mask, ref, 0.2, 0.3, 0.04, aggregation=aggregation, max_tokens=20
    )
    objective = GRPO(epsilon_high=0.3, beta=0.04, aggregation=aggregation, max_tokens=20, temperature=0.7)
    batch = batch_of([items], beta=True)
    with torch.no_grad():
        result = objective.loss(model, batch)
    [weight] = objective.weights(batch).values()
    assert (result.sums["loss"] / weight).item() == pytest.approx(expected.item(), rel=1e-5)
    shares = mask / mask.sum() if aggregation == "token" else mask / mask.sum(1, keepdim=True) / len(mask)
    d = ref - new
    for name, values in {"entropy": -new, "log_ratio": (new - old).abs(), "kl": d.exp() - d - 1}.items():
        assert (result.metrics[name] / weight).item() == pytest.approx(
            (values * shares).sum().item(), rel=1e-4
        ), name


def micro_batch_splits(items):
    yield "padded", [[[item] for item in items]]
    yield "packed", [[items]]
    yield "one by one", [[[item]] for item in items]
    yield "uneven", [[items[:1]], [items[1:4]], [[item] for item in items[4:]]]
    yield "two packed rows", [[items[:2], items[2:]]]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradient_does_not_depend_on_the_micro_batches(tiny_directory, method, aggregation):
    settings = validate_config(
        {"model": "m", "data": {"train": "unused"}, "run": {"steps": 3, "batch_size": 6, "precision": "fp32"}}
    )
    items, results = completions(6, seed=1), {}
    for name, cut in micro_batch_splits(items):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
        if method == "lora":
            torch.manual_seed(0)
            whet.attach_lora(model, rank=4)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.05
        else:
            model.requires_grad_(True)
        objective = GRPO(beta=0.1, aggregation=aggregation, max_tokens=16, temperature=0.8)
        trainer, seen = Trainer(model, objective, [], settings), {}

        def capture(optimizer, args, kwargs, model=model, seen=seen):
            seen.update({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})

        trainer.optimizer.register_step_pre_hook(capture)
        results[name] = trainer.step([batch_of(rows, beta=True) for rows in cut]), seen
    metrics, expected = results["padded"]
    assert sum(g.double().square().sum() for g in expected.values()) > 1e-6
    for name, (actual, gradients) in results.items():
        difference = sum((gradients[key] - expected[key]).double().square().sum() for key in expected)
        scale = sum(expected[key].double().square().sum() for key in expected)
        assert (difference / scale).sqrt() < TOLERANCE, name
        for key in ("loss", "entropy", "kl", "log_ratio", "clip_fraction"):
            assert actual[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), (name, key)


def test_gradient_at_ratio_1_is_that_of_reinforce(tiny):
    """The loss is the mean over tokens of -A * log p, because clipping does not affect fresh completions."""
    model, _ = tiny
    model.requires_grad_(True)
    items = completions(4, seed=2)
    batch = batch_of([items], beta=False)
    # not in no_grad: a few rows without gradients take another product, with other rounding
    fresh = completion_logprobs(model, batch, temperature=1.0).detach()
    batch = batch.with_columns("token", old_logprobs=fresh)
    result = GRPO().loss(model, batch)
    assert result.metrics["log_ratio"] == 0
    assert result.metrics["clip_fraction"] == 0
    wanted = -(
        completion_logprobs(model, batch, temperature=1.0) * batch.column("advantages")[batch.examples]
    ).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(result.sums["loss"], parameters)
    for actual, expected in zip(ours, torch.autograd.grad(wanted, parameters), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_python_config_equals_the_yaml_config():
    config = GRPOConfig(rewards=["exact_match"], group_size=4)
    assert (config.epsilon, config.beta, config.resolved_aggregation) == (0.2, 0.0, "token")
    assert GRPOConfig(rewards=["exact_match"], advantage="dr_grpo").resolved_aggregation == "constant"
    assert GRPOConfig(rewards=["exact_match"], advantage="reinforce", group_size=1).group_size == 1
