"""Each layout equals a dense boolean reference in float64."""

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
    """Softmax over allowed keys, spelled out; allowed is [B, queries, keys]."""
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
def test_packed_documents_see_only_themselves(masked):
    documents = ((3, 5, 1, 2), (11,))
    q, k, v = qkv(2, 11, 11)
    layout = Layout.packed(documents, device=torch.device("cpu"))
    if masked:  # what accelerators use, built here on the CPU
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

    class Accelerator:  # packed() looks at the type only, and moves tensors to the device
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
def test_cached_rows_see_real_slots_up_to_themselves(new_tokens, padded):
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
