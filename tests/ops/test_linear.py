"""The matmul for few rows equals F.linear up to rounding, and training never uses it."""

import pytest
import torch
import torch.nn.functional as F

from whet.ops.linear import Linear, linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (16, 1), (3, 7), (48,), (49,), (5, 4, 6)])
def test_linear_matches_the_float64_formula(shape, bias):
    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(*size, generator=generator) for size in ((*shape, 40), (30, 40), (30,)))
    used_bias = offset if bias else None
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    with torch.no_grad():
        output = linear(x, weight, used_bias)
    assert output.shape == (*shape, 30)
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_and_other_dtypes_use_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "mm", lambda *args: calls.append(args))
    layer = Linear(8, 8)
    x = torch.randn(4, 8)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    with torch.no_grad():
        assert layer.double()(x.double()).dtype == torch.float64
    assert not calls
