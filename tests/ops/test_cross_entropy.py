"""The chunked loss and its gradients equal the plain formula in float64, for every option of the head."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from whet.ops import cross_entropy as module
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.dispatch import plan_for_device
from whet.ops.lm_head import Head

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "everything": {"bias": True, "scale": 1.5, "softcap": 5.0},
}


def tensors(bias=False, rows=37):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    bias = torch.randn(50, generator=generator, requires_grad=True) if bias else None
    targets = torch.randint(0, 50, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    return hidden, weight, bias, targets, weights


def naive(hidden, weight, bias, targets, weights, *, scale, softcap):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.sum() if weights is None else (losses * weights).sum()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_loss_and_gradients_match_the_float64_formula(name, weighted, rows, monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda weight, **_: rows)
    settings = {"scale": 1.0, "softcap": None, **HEADS[name]}
    hidden, weight, bias, targets, weights = tensors(bias=settings.pop("bias", False))
    weights = weights if weighted else None
    loss = linear_cross_entropy(hidden, Head(weight, bias, **settings), targets, weights=weights)
    (loss * 0.7).backward()

    wide = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    expected = naive(*wide, targets, None if weights is None else weights.double(), **settings)
    (expected * 0.7).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((hidden, weight, bias), wide, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_never_builds_more_than_a_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda weight, **_: 8)
    seen = []
    original = F.linear
    monkeypatch.setattr(module.F, "linear", lambda x, w: seen.append(len(x)) or original(x, w))
    hidden, weight, _, targets, _ = tensors()
    linear_cross_entropy(hidden, Head(weight), targets).backward()
    assert seen == [8, 8, 8, 8, 5]


def test_chunks_are_bounded_for_any_vocabulary():
    for vocab_size in (100, 49_152, 256_000, 10**9):
        rows = module.chunk_rows(torch.empty(vocab_size, 1, device="meta"))
        assert rows >= 1
        assert rows == 1 or rows * vocab_size <= 64 * 2**20


def test_chunks_of_a_trained_head_have_more_rows_than_it_has_columns():
    weight = torch.empty(128_256, 2048, device="meta")
    with plan_for_device("cuda"):
        assert module.chunk_rows(weight) <= 2048
        assert module.chunk_rows(weight, trained=True) == 2 * 2048
        assert module.chunk_rows(torch.empty(100, 2048, device="meta"), trained=True) == 8192
    assert module.chunk_rows(weight, trained=True) == module.chunk_rows(
        weight
    )  # no exception for trained heads on a CPU


@given(count=st.integers(1, 40_000), rows=st.integers(1, 9000))
def test_chunks_cover_all_rows_once_and_have_similar_sizes(count, rows):
    chunks = list(module.spans(count, rows))
    assert [index for span in chunks for index in range(count)[span]] == list(range(count))
    sizes = [len(range(count)[span]) for span in chunks]
    assert max(sizes) <= rows
    assert len(chunks) == -(-count // rows)
    assert max(sizes) - min(sizes) <= 128 * len(sizes)


def test_sum_beyond_float16_range_is_scaled_before_rounding():
    hidden = torch.full((4096, 2), 20.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(2, 2, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, Head(weight), torch.zeros(4096, dtype=torch.long))
    (loss / 4096).backward()
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[-10.0, -10.0], [10.0, 10.0]]))


def test_frozen_head_gets_no_gradient():
    hidden, weight, _, targets, _ = tensors()
    frozen = weight.detach()
    linear_cross_entropy(hidden, Head(frozen), targets).backward()
    assert frozen.grad is None
    assert hidden.grad is not None


def test_no_supervised_positions_give_zero_loss_and_gradient():
    hidden, weight, _, targets, _ = tensors()
    loss = linear_cross_entropy(hidden[:0], Head(weight), targets[:0])
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().sum() == 0


def test_bf16_hidden_states_are_accurate_to_bf16_rounding():
    hidden, weight, _, targets, _ = tensors(rows=200)
    exact = naive(hidden.double(), weight.double(), None, targets, None, scale=1.0, softcap=None)
    loss = linear_cross_entropy(hidden.bfloat16(), Head(weight), targets)
    assert loss.dtype == torch.float32
    assert abs(loss.item() / exact.item() - 1) < 0.01


def test_no_positions_give_zero_gradients_to_hidden_and_head():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, Head(weight), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(weight.grad, torch.zeros(7, 4))
    assert hidden.grad.shape == (0, 4)
