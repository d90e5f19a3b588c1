"""Chunked log-probabilities and divergences equal plain float64 formulas, gradients included."""

import pytest
import torch

from whet.ops import cross_entropy
from whet.ops.kl_divergence import linear_kl, linear_topk_kl, top_logprobs
from whet.ops.lm_head import Head
from whet.ops.logprobs import token_logprobs

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 3.0, "bias": True, "scale": 1.5},
}


def make_head(kind, *, vocab=37, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    settings = dict(HEADS[kind])
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64).requires_grad_()
    bias = (
        torch.randn(vocab, generator=generator, dtype=torch.float64).requires_grad_()
        if settings.pop("bias", False)
        else None
    )
    return Head(weight, bias, **settings)


def logits_of(hidden, head):
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    return head.transform(logits)


def gradients(loss, hidden, head):
    inputs = [tensor for tensor in (hidden, head.weight, head.bias) if tensor is not None]
    return torch.autograd.grad(loss, inputs, retain_graph=True)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(cross_entropy._MAX_CHUNK, "cpu", (5, 2**26))


@pytest.mark.parametrize("kind", HEADS)
def test_token_logprobs_equal_log_softmax(kind):
    head, hidden = make_head(kind), torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 37, (13,))
    output = token_logprobs(hidden, head, targets)
    expected = logits_of(hidden, head).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(output, expected)
    factor = torch.randn(13, dtype=torch.float64)  # an arbitrary downstream function
    for ours, theirs in zip(
        gradients((output * factor).tanh().sum(), hidden, head),
        gradients((expected * factor).tanh().sum(), hidden, head),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def divergence(student, teacher, kind, temperature):
    """Compute the sums of p log(p / q) over the vocabulary explicitly."""
    q, p = (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)
    mixture = (p + q) / 2

    def kl(a, b):
        return (a * (a / b).log()).sum()

    return {"forward": kl(p, q), "reverse": kl(q, p), "jsd": (kl(p, mixture) + kl(q, mixture)) / 2}[kind]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("head_kind", HEADS)
def test_divergences_match_their_formulas(head_kind, kind, temperature):
    student, teacher = make_head(head_kind), make_head("capped", size=6, seed=1)
    hidden = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    output = linear_kl(hidden, student, teacher_hidden, teacher, temperature=temperature, divergence=kind)
    expected = divergence(logits_of(hidden, student), logits_of(teacher_hidden, teacher), kind, temperature)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(
        gradients(output * 3, hidden, student), gradients(expected * 3, hidden, student), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    (output * 2).backward()
    assert teacher_hidden.grad is None, "the teacher must get no gradient"
    assert teacher.weight.grad is None


def class_logits(logits, ids, temperature):
    """Return the logits of k + 1 classes: log p of some tokens and of all others, divided by a temperature."""
    logs = logits.log_softmax(-1)
    chosen = torch.zeros_like(logs, dtype=torch.bool).scatter(1, ids, True)
    rest = (logs.exp() * ~chosen).sum(-1, keepdim=True).log()
    return torch.cat((logs.gather(1, ids), rest), 1) / temperature


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("head_kind", HEADS)
def test_top_k_divergences_match_their_formulas(head_kind, kind, temperature):
    student, teacher = make_head(head_kind), make_head("capped", size=6, seed=1)
    hidden = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(13, 6, dtype=torch.float64)
    ids, logprobs = top_logprobs(teacher_hidden, teacher, top_k=5)
    teacher_logits = logits_of(teacher_hidden, teacher).detach()
    torch.testing.assert_close(ids.sort().values, teacher_logits.topk(5).indices.sort().values)
    torch.testing.assert_close(logprobs, class_logits(teacher_logits, ids, 1.0))
    output = linear_topk_kl(hidden, student, ids, logprobs, temperature=temperature, divergence=kind)
    classes = class_logits(logits_of(hidden, student), ids, temperature)
    expected = divergence(classes, logprobs / temperature, kind, 1.0)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(
        gradients(output * 3, hidden, student), gradients(expected * 3, hidden, student), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_top_k_divergence_is_a_lower_bound_and_exact_for_all_tokens(kind):
    student, teacher = make_head("bias"), make_head("capped", size=6, seed=1)
    hidden, states = torch.randn(13, 8, dtype=torch.float64), torch.randn(13, 6, dtype=torch.float64)
    for temperature in (1.0, 4.0):
        output = linear_topk_kl(
            hidden,
            student,
            *top_logprobs(states, teacher, top_k=37),
            temperature=temperature,
            divergence=kind,
        )
        full = linear_kl(hidden, student, states, teacher, temperature=temperature, divergence=kind)
        torch.testing.assert_close(output, full)
    bounds = [
        linear_topk_kl(hidden, student, *top_logprobs(states, teacher, top_k=k), divergence=kind).item()
        for k in (1, 4, 16, 36, 37)
    ]
    assert bounds == sorted(bounds)  # data processing inequality
    assert bounds[0] < 0.9 * bounds[-1]
    same = top_logprobs(hidden, student, top_k=4)
    assert linear_topk_kl(hidden, student, *same, temperature=3.0, divergence=kind).item() < 1e-12


def test_no_grad_builds_no_graph():
    head, hidden = make_head("plain"), torch.randn(9, 8, dtype=torch.float64)
    with torch.no_grad():
        assert not token_logprobs(hidden, head, torch.zeros(9, dtype=torch.long)).requires_grad
        assert linear_kl(hidden, head, hidden, head).item() == pytest.approx(0, abs=1e-12)
