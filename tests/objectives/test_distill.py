"""Distillation: both forms match the formula, teachers get no gradient, and tokenizers must agree."""

import math
from dataclasses import replace

import pytest
import torch

import whet
from tiny import random_examples, run_config, write_tiny_model
from whet.data.batches import make_batch
from whet.errors import ConfigError, ModelError
from whet.hardware import Precision
from whet.objectives.distill import Distillation, distillation_loss, soft_target_loss
from whet.objectives.sft import SFT
from whet.training.loss import evaluate_loss


def kl(teacher, student, temperature):
    """Return the KL divergence in float64."""
    p, q = ((logits.double() / temperature).softmax(-1) for logits in (teacher, student))
    return (p * (p / q).log()).sum(-1)


def test_soft_target_loss_matches_the_formula():
    student, teacher = torch.randn(2, 5, 11, requires_grad=True), torch.randn(2, 5, 11, requires_grad=True)
    loss = soft_target_loss(student, teacher, temperature=3.0)
    assert loss.item() == pytest.approx(9 * kl(teacher, student, 3.0).mean().item(), rel=1e-5)
    loss.backward()
    assert teacher.grad is None
    assert soft_target_loss(student, student, temperature=2.0).item() == pytest.approx(0, abs=1e-6)


@pytest.fixture
def pair(tiny_directory, tmp_path):
    """Return a student, and a teacher of another size."""
    write_tiny_model(tmp_path / "teacher", hidden_size=48, intermediate_size=80)
    student, tokenizer = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    teacher, _ = whet.load(tmp_path / "teacher", dtype=torch.float32, device="cpu")
    return student, teacher, tmp_path / "teacher"


@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_distillation_loss_matches_the_formula(pair, alpha):
    student, teacher, _ = pair
    tokens = torch.randint(0, 260, (3, 14))
    loss = distillation_loss(student, teacher, tokens, temperature=4.0, alpha=alpha)
    ours, theirs = student(tokens[:, :-1]), teacher(tokens[:, :-1])
    soft = 16 * kl(theirs, ours, 4.0).mean()
    hard = torch.nn.functional.cross_entropy(ours.double().flatten(0, 1), tokens[:, 1:].flatten())
    expected = alpha * soft + (1 - alpha) * hard
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_objective_uses_only_supervised_tokens_of_packed_rows(pair, divergence):
    student, teacher, _ = pair
    examples = random_examples(3, seed=5)
    objective = Distillation(
        [(teacher, 3.0), (student, 1.0)], temperature=2.0, alpha=0.6, divergence=divergence
    )
    batch = make_batch([examples])
    result, weights = objective.loss(student, batch), objective.weights(batch)
    soft = hard = 0.0
    for example in examples:
        tokens = torch.tensor([example.tokens])
        ours, theirs = (model(tokens[:, :-1])[0].detach().double() for model in (student, teacher))
        for place in range(1, len(example.tokens)):
            if not example.supervised[place]:
                continue
            p, q = (theirs[place - 1] / 2).softmax(-1), (ours[place - 1] / 2).softmax(-1)
            middle = (p + q) / 2
            each = {
                "forward": (p * (p / q).log()).sum(),
                "reverse": (q * (q / p).log()).sum(),
                "jsd": ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2,
            }
            soft += 0.75 * each[divergence].item()  # the student is its own second teacher: no distance
            hard -= ours[place - 1].log_softmax(-1)[example.tokens[place]].item()
    assert result.sums["soft_loss"].item() == pytest.approx(soft, rel=1e-4)
    assert result.sums["hard_loss"].item() == pytest.approx(hard, rel=1e-4)
    assert weights == {"soft_loss": batch.supervised, "hard_loss": batch.supervised}
    assert objective.coefficients == pytest.approx({"soft_loss": 0.6 * 4, "hard_loss": 0.4})


@pytest.mark.parametrize("pack", [True, False])
def test_student_approaches_its_teacher(pair, tiny_directory, tmp_path, pack):
    _, _, teacher = pair
    config = run_config(
        tiny_directory, tmp_path,
        method={"kind": "full"},
        objective={"kind": "distill", "teacher": [{"model": str(teacher), "weight": 2}], "temperature": 2.0},
        data={"pack": pack},
        optim={"lr": 1e-2},
        run={"steps": 10, "batch_size": 8},
    )  # fmt: skip
    result = whet.train(config)
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert "eval_cross_entropy" in result.metrics


@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_evaluation_reports_the_perplexity_of_the_text(pair, alpha):
    student, teacher, _ = pair
    batches = [
        make_batch([examples]) for examples in (random_examples(3, seed=1), random_examples(2, seed=2))
    ]
    batches = [replace(batch, supervised_bytes=batch.supervised) for batch in batches]
    precision = Precision(torch.float32, torch.float32, torch.float32, "as loaded")
    plain = evaluate_loss(student, SFT(), batches, precision=precision)
    actual = evaluate_loss(student, Distillation([(teacher, 1.0)], alpha=alpha), batches, precision=precision)
    assert actual["eval_loss"] != pytest.approx(plain["eval_loss"])
    assert actual["eval_cross_entropy"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    for name in ("eval_perplexity", "eval_bits_per_byte"):
        assert actual[name] == pytest.approx(plain[name], rel=1e-5)


def test_teacher_with_another_tokenizer_is_an_error(pair, tiny_directory, tmp_path):
    write_tiny_model(tmp_path / "wider", vocab_size=300)
    config = run_config(
        tiny_directory, tmp_path, objective={"kind": "distill", "teacher": str(tmp_path / "wider")}
    )
    with pytest.raises(ModelError, match="has a vocabulary of 300, but .* of 260"):
        whet.train(config)
    from transformers import AutoTokenizer

    write_tiny_model(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "<|human|>"))
    assert "<|human|>" in AutoTokenizer.from_pretrained(tmp_path / "other").get_vocab()
    config["objective"]["teacher"] = str(tmp_path / "other")
    with pytest.raises(
        ModelError,
        match=r"different tokenizer than .*: 2 tokens differ, such as '<\|human\|>' \(id 257 instead of None\)",
    ):
        whet.train(config)
    with pytest.raises(ConfigError, match="distillation needs at least one teacher"):
        Distillation([])


def test_temperature_scaling_matches_the_paper(pair):
    """Gradients of the soft term shrink with 1 / T^2, which the factor T^2 compensates."""
    student, teacher, _ = pair
    tokens = torch.randint(0, 260, (2, 9))
    norms = {}
    for temperature in (20.0, 40.0):
        student.zero_grad()
        distillation_loss(student, teacher, tokens, temperature=temperature, alpha=1.0).backward()
        norms[temperature] = math.sqrt(sum(p.grad.square().sum().item() for p in student.parameters()))
    assert norms[20.0] == pytest.approx(norms[40.0], rel=0.2)
