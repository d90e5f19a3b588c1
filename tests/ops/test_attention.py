"""Attention with each layout equals a dense float64 reference with a bool mask."""

import pytest
import torch

from whet.ops.attention import Layout, attend


def qkv(batch, queries, keys, *, heads=4, kv_heads=2, size=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, queries, size, generator=generator)
    k = torch.randn(batch, kv_heads, keys, size, generator=generator)
    v = torch.randn(batch, kv_heads, keys, size, generator=generator)
    return q, k, v


def dense(q, k, v, allowed):
    """Attention as an explicit softmax over the allowed keys; allowed is [B, queries, keys]."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ v


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_plain_rows_are_causal(kv_heads):
    q, k, v = qkv(2, 11, 11, kv_heads=kv_heads)
    expected = dense(q, k, v, causal(11).expand(2, -1, -1))
    torch.testing.assert_close(attend(q, k, v, Layout()).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["by document", "by mask"])
def test_packed_documents_attend_only_to_themselves(masked):
    documents = ((3, 5, 1, 2), (11,))
    q, k, v = qkv(2, 11, 11)
    layout = Layout.packed(documents, device=torch.device("cpu"))
    if masked:  # the layout of accelerators, built on the CPU
        layout = _masked(documents)
    allowed = torch.zeros(2, 11, 11, dtype=torch.bool)
    for row, lengths in enumerate(documents):
        start = 0
        for length in lengths:
            allowed[row, start : start + length, start : start + length] = causal(length)
            start += length
    torch.testing.assert_close(
        attend(q, k, v, layout).double(), dense(q, k, v, allowed), rtol=1e-5, atol=1e-5
    )


def _masked(documents):
    real = torch.device("cpu")

    class Accelerator:  # packed() reads only the type, and moves tensors to the device
        type = "cuda"

    def to(tensor, device, non_blocking=False):
        return tensor

    original, original_arange = torch.Tensor.to, torch.arange
    torch.Tensor.to = lambda self, *a, **k: (
        self if a and isinstance(a[0], Accelerator) else original(self, *a, **k)
    )
    torch.arange = lambda *a, device=None, **k: original_arange(*a, device=real, **k)
    try:
        return Layout.packed(documents, device=Accelerator())
    finally:
        torch.Tensor.to, torch.arange = original, original_arange


@pytest.mark.parametrize("new_tokens", [1, 3, 7])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_queries_attend_to_earlier_real_slots(new_tokens, padded):
    q, k, v = qkv(2, new_tokens, 7)
    visible = torch.ones(2, 7, dtype=torch.bool)
    if padded:
        visible[1, :3] = False
    layout = Layout.cached(visible, new_tokens=new_tokens, padded=padded)
    allowed = causal(7)[7 - new_tokens :] & visible[:, None, :]
    output, expected = attend(q, k, v, layout).double(), dense(q, k, v, allowed)
    assert output.isfinite().all()
    for row in range(2):
        real = visible[row, 7 - new_tokens :]
        torch.testing.assert_close(output[row][:, real], expected[row][:, real], rtol=1e-5, atol=1e-5)


MASKS = {
    # (layout, allowed [B, queries, keys], distance [B, queries, keys])
    "plain": lambda: (Layout(), causal(9)[None], _distances(9)[None]),
    "packed by document": lambda: (Layout(documents=((4, 5),)), (causal(9) & _same_document((4, 5)))[None], _distances(9)[None]),
    "packed by mask": lambda: (
        Layout(mask=(causal(9) & _same_document((4, 5)))[None, None], causal=False), (causal(9) & _same_document((4, 5)))[None], _distances(9)[None],
    ),
    "cached, padded": lambda: _cached(new_tokens=3),
    "cached, one token": lambda: _cached(new_tokens=1),
}  # fmt: skip


def _distances(length):
    positions = torch.arange(length)
    return positions[:, None] - positions


def _same_document(lengths):
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return segments[:, None] == segments


def _cached(*, new_tokens):
    """Return two rows of nine slots, the second left-padded by three slots."""
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    slots = (real.long().cumsum(1) - 1).clamp(min=0)
    layout = Layout.cached(real, new_tokens=new_tokens, padded=True, slots=slots)
    allowed = (causal(9) & real[:, None])[:, 9 - new_tokens :]
    return layout, allowed, (slots[:, :, None] - slots[:, None])[:, 9 - new_tokens :]


@pytest.mark.parametrize("extra", ["", "softcap", "slopes", "both"])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 50])
@pytest.mark.parametrize("kind", MASKS)
def test_mask_window_softcap_and_alibi_match_the_dense_reference(kind, window, extra):
    layout, allowed, distance = MASKS[kind]()
    if window is not None:
        allowed = allowed & (distance < window)
    batch, queries, keys = allowed.shape
    q, k, v = (tensor.double() for tensor in qkv(batch, queries, keys))
    softcap = 1.5 if extra in ("softcap", "both") else None
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.7]).double() if extra in ("slopes", "both") else None
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance[:, None]
    expected = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    output = attend(q, k, v, layout, window=window, softcap=softcap, slopes=slopes)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_single_query_with_grouped_heads_matches_the_formula(masked, window):
    """Ragged rows in a cache whose newest slot is not the last one, as in decoding with a static cache."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 6, 1, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 2, 9, 8, generator=generator, dtype=torch.float64)
    slots = torch.arange(9).expand(3, -1)
    visible = torch.ones(3, 9, dtype=torch.bool)
    if masked:
        visible[1, :3] = False  # left padding
        visible[:, 7:] = False  # not yet written
    newest = torch.full((3, 1), 6 if masked else 8)
    layout = Layout(
        visible=visible,
        slots=slots,
        mask=visible[:, None, None, :] if masked else None,
        causal=False,
        queries=newest,
    )
    output = attend(queries, keys, values, layout, window=window)
    for row in range(3):
        for head in range(6):
            scores = keys[row, head // 3] @ queries[row, head, 0] / 8**0.5
            attended = visible[row] & (newest[row] - slots[row] < (window or 99))
            weights = scores.masked_fill(~attended, -torch.inf).softmax(0)
            torch.testing.assert_close(output[row, head, 0], weights @ values[row, head // 3])


@pytest.mark.parametrize("documents", [None, ((3, 5, 1, 2), (11,))])
def test_autocast_casts_float32_queries_and_keys(documents):
    """RoPE returns queries and keys in float32, while values are in 16 bits."""
    q, k, v = qkv(2, 11, 11)
    layout = Layout() if documents is None else Layout.packed(documents, device=torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(q, k, v.bfloat16(), layout)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout))


@pytest.mark.parametrize("window", [None, 3])
def test_additive_mask_equals_the_bool_mask(window, monkeypatch):
    """On a GPU without gradients, the additive mask is built once for all layers with the same mask."""
    torch.manual_seed(0)
    visible = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    layout = Layout.cached(visible, new_tokens=4, padded=True)
    queries, keys, values = (torch.randn(2, heads, n, 8) for heads, n in ((4, 4), (2, 8), (2, 8)))
    plain = attend(queries, keys, values, layout, window=window)
    monkeypatch.setattr("whet.ops.kernels.fused_decode.is_supported", lambda *tensors: True)
    for _ in range(2):
        torch.testing.assert_close(attend(queries, keys, values, layout, window=window), plain)
    [additive] = layout._additive_masks.values()
    assert additive.dtype == queries.dtype
    assert set(additive.unique().tolist()) == {0.0, -torch.inf}
