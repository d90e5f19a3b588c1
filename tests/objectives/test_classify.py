"""Classification loss: compared with torch or a float64 formula, and independent of the micro-batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import whet
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.models.heads import ClassificationHead
from whet.objectives.classify import Classify, balanced_weights, multi_label_weights

WEIGHTS = [0.5, 2.0, 1.25, 0.25]


def samples(count=12, *, marks=False, soft=False, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    actual = []
    for number in range(count):
        tokens = rng.integers(0, 260, rng.integers(2, longest))
        values = tuple(map(float, rng.integers(0, 2, 4))) if marks else (float(rng.integers(4)),)
        values = tuple(rng.random(4).tolist()) if soft else values
        actual.append(Example(tokens, np.ones(len(tokens), dtype=bool), f"text {number}", values))
    return actual


def objective(**settings):
    pooling, bias = settings.pop("pooling", "last"), settings.pop("bias", False)
    head = ClassificationHead(32, 4, pooling=pooling, bias=bias).initialise(3)
    return Classify(head, **settings)


def values_of(task, model, batch):
    """Return the mean loss, as the trainer computes it."""
    actual = task.loss(model, batch)
    return (actual.sums["loss"] / task.weights(batch)["loss"]).item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("normalise", ["samples", "weights"])
def test_single_label_loss_matches_torch_cross_entropy(tiny, smoothing, weights, normalise):
    model, _ = tiny
    batch = make_batch([samples()])
    task = objective(class_weights=weights, label_smoothing=smoothing, normalise=normalise)
    logits, targets = task.logits(model, batch).double(), batch.column("values")[:, 0].long()
    wide = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    reduction = "mean" if normalise == "weights" else "sum"
    expected = F.cross_entropy(logits, targets, weight=wide, label_smoothing=smoothing, reduction=reduction)
    expected = expected / (len(targets) if normalise == "samples" else 1)
    assert values_of(task, model, batch) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("gamma", "smoothing"), [(2.0, 0.0), (1.5, 0.1)])
def test_focal_loss_matches_the_formula(tiny, gamma, smoothing):
    model, _ = tiny
    batch = make_batch([samples()])
    task = objective(class_weights=WEIGHTS, focal=gamma, label_smoothing=smoothing)
    total = 0.0
    for row, label in zip(
        task.logits(model, batch).double().tolist(), batch.column("values")[:, 0].tolist(), strict=True
    ):
        highest = max(row)
        norm = sum(math.exp(value - highest) for value in row)
        for number, value in enumerate(row):
            p = math.exp(value - highest) / norm
            q = (1 - smoothing) * (number == label) + smoothing / 4
            total -= q * WEIGHTS[number] * (1 - p) ** gamma * math.log(p)
    assert values_of(task, model, batch) == pytest.approx(total / 12, rel=1e-5)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_multi_label_loss_matches_torch_binary_cross_entropy(tiny, weights, soft):
    model, _ = tiny
    batch = make_batch([samples(marks=True, soft=soft)])
    task = objective(multi_label=True, class_weights=weights)
    wide = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(
        task.logits(model, batch).double(), batch.column("values").double(), pos_weight=wide
    )
    assert values_of(task, model, batch) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("soft", [False, True])
def test_multi_label_focal_loss_with_smoothing_matches_the_formula(tiny, soft):
    model, _ = tiny
    batch = make_batch([samples(marks=True, soft=soft)])
    task = objective(multi_label=True, class_weights=WEIGHTS, focal=2.0, label_smoothing=0.2)
    p = 1 / (1 + np.exp(-task.logits(model, batch).detach().double().numpy()))
    t = batch.column("values").double().numpy() * 0.8 + 0.1
    terms = -t * WEIGHTS * (1 - p) ** 2 * np.log(p) - (1 - t) * p**2 * np.log(1 - p)
    assert values_of(task, model, batch) == pytest.approx(terms.mean(), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"normalise": "weights", "focal": 1.0}])
def test_gradient_does_not_depend_on_the_micro_batches(tiny, settings):
    model, _ = tiny
    whet.attach_lora(model, rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    texts = samples(9)
    task = objective(class_weights=WEIGHTS, **settings)

    def gradients(cuts):
        batches = [make_batch(rows) for rows in cuts]
        total = sum(task.weights(batch)["loss"] for batch in batches)
        own = [p for p in model.parameters() if p.requires_grad] + [*task.head.parameters()]
        for p in own:
            p.grad = None
        for batch in batches:
            (task.loss(model, batch).sums["loss"] / total).backward()
        return torch.cat([p.grad.flatten() for p in own])

    whole = gradients([[texts]])
    for cuts in ([[[t] for t in texts]], [[texts[:2]], [texts[2:]]], [[[t]] for t in texts]):
        other = gradients(cuts)
        assert (other - whole).norm() <= 2e-5 * whole.norm()


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_packed_padded_and_solo_texts_have_equal_logits(tiny, pooling):
    """They also match a single text without packing or padding."""
    model, _ = tiny
    texts = samples(7, seed=4)
    task = objective(pooling=pooling, bias=True)
    with torch.no_grad():
        torch.nn.init.normal_(task.head.score.bias)
        expected = []
        for text in texts:
            hidden = model.hidden(torch.tensor(text.tokens[:-1])[None])[0]
            state = {"last": hidden[-1], "mean": hidden.mean(0), "first": hidden[0]}[pooling]
            expected.append(F.linear(state, task.head.score.weight, task.head.score.bias))
        expected = torch.stack(expected)
        packed = task.logits(model, make_batch([texts[:3], texts[3:]]))
        padded = task.logits(model, make_batch([[text] for text in texts], width=64))
        solo = torch.cat([task.logits(model, make_batch([[text]])) for text in texts])
    for actual in (packed, padded, solo):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_class_weights_match_their_formulas():
    counts = np.array([100, 10, 50])
    roots = np.sqrt(160 / (3 * counts))
    np.testing.assert_allclose(balanced_weights(counts, "sqrt_inverse"), roots * 3 / roots.sum())
    inverse = 160 / (3 * counts)
    np.testing.assert_allclose(balanced_weights(counts, "inverse"), inverse * 3 / inverse.sum())
    effective = np.array([0.001 / (1 - 0.999**n) for n in counts])
    np.testing.assert_allclose(balanced_weights(counts, "effective"), effective * 3 / effective.sum())
    assert balanced_weights(counts, "none") == [1, 1, 1]
    assert all(math.isfinite(w) for w in balanced_weights(np.array([5, 0]), "inverse"))
    np.testing.assert_allclose(multi_label_weights(np.array([20, 80]), 100, "inverse"), [4, 0.25])
    np.testing.assert_allclose(multi_label_weights(np.array([20, 80]), 100, "sqrt_inverse"), [2, 0.5])


def test_head_initialization_depends_on_the_seed_only_and_is_float32():
    first, again, other = (ClassificationHead(32, 4).initialise(seed).score.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float32
    assert ClassificationHead(4000, 4).initialise(0).score.weight.std().item() == pytest.approx(
        0.02, rel=0.05
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ClassificationHead(8, 2)(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("focal", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("logit", [3.0, 30.0, 200.0])
def test_focal_gradient_of_a_confident_prediction_is_finite(logit, marks, focal):
    objective = Classify(ClassificationHead(4, 3), multi_label=marks, focal=focal)
    logits = torch.tensor([[logit, -logit, -logit]], requires_grad=True)
    targets = torch.tensor([[1.0, 0, 0]]) if marks else torch.tensor([0])
    actual = (objective._multi_label_losses if marks else objective._single_label_losses)(
        logits, targets
    ).sum()
    actual.backward()
    assert logits.grad.isfinite().all()
    wide = logits.detach().double().requires_grad_()
    if marks:
        right = wide.sigmoid() * targets + (-wide).sigmoid() * (1 - targets)
        other = (-wide).sigmoid() * targets + wide.sigmoid() * (1 - targets)
        wanted = -(right.log() * other**focal).mean()
    else:
        logp = wide.log_softmax(1)
        wanted = -logp[0, 0] * logp[0, 1:].exp().sum() ** focal
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-3, atol=1e-9)
