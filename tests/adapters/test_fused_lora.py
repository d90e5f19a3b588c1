"""The operations that compiled layers with adapters call: what the compiler is told of them is true."""

import pytest
import torch

from whet.adapters import fused_lora
from whet.adapters.adapter import LoRASettings, unchanging
from whet.adapters.layers.lora_linear import LoRALinear


@pytest.mark.parametrize("rows", [1, 8, 30, 60])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [0, 5, 16])
def test_outputs_are_as_the_compiler_expects_them(rows, biased, first):
    torch.manual_seed(0)
    flat, weight, low, b = (torch.randn(shape) for shape in ((rows, 16), (12, 16), (rows, 4), (12, 4)))
    bias = torch.randn(12) if biased else None
    begun, both = (torch.cat(pair, dim=1) for pair in ((flat[:, :first], low), (weight[:, :first], b)))
    arguments = (flat, weight, bias, begun, both, first, True)
    torch.library.opcheck(
        torch.ops.whet.lora_output.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    expected = flat @ weight.T + low @ b.T + (0 if bias is None else bias)
    torch.testing.assert_close(fused_lora.lora_output(*arguments), expected)


def test_gradients_are_as_the_compiler_expects_them():
    torch.manual_seed(0)
    low, a, grads, weights = (
        torch.randn(5, 4),
        torch.randn(4, 16),
        [torch.randn(5, 12)] * 2,
        [torch.randn(12, 16)] * 2,
    )
    torch.library.opcheck(
        torch.ops.whet.lora_input_gradient.default,
        (low, a, grads, weights),
        test_utils=("test_schema", "test_faketensor"),
    )
    expected = low @ a + 2 * grads[0] @ weights[0]
    torch.testing.assert_close(fused_lora.lora_input_gradient(low, a, grads, weights), expected)


@pytest.mark.parametrize("biased", [False, True])
def test_what_dropout_left_is_read_by_the_update_alone(biased):
    torch.manual_seed(0)

    def numbers(*shape, train=True):
        return torch.randn(shape, dtype=torch.float64, requires_grad=train)

    weight, bias = numbers(12, 16, train=False), numbers(12, train=False) if biased else None
    leaves = x, dropped, a, b = numbers(2, 5, 16), numbers(2, 5, 16), numbers(4, 16), numbers(12, 4)
    operands = fused_lora.Operands(weight, bias, a, b, 0.5)
    [found] = fused_lora.low_rank_products(x, [operands], dropped)
    wanted = torch.nn.functional.linear(x, weight, bias) + 0.5 * dropped @ a.T @ b.T
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(y, leaves, upstream) for y in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scales", [(2.0, 2.0), (0.5, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("first", [None, 64, 96])
def test_layers_that_read_one_input_are_as_alone(dtype, tolerance, scales, first, monkeypatch):
    if first is not None:  # as on a GPU
        monkeypatch.setattr(fused_lora, "_first_columns", lambda weight: first)
    torch.manual_seed(0)
    wide = torch.float64

    def numbers(*shape):
        return torch.randn(shape, dtype=wide).to(dtype)

    x = numbers(2, 5, 96).requires_grad_()
    layers = []
    for out, rank, scale in zip((12, 7), (4, 3), scales, strict=True):
        a, b = numbers(rank, 96).requires_grad_(), numbers(out, rank).requires_grad_()
        layers.append(fused_lora.Operands(numbers(out, 96), numbers(out), a, b, scale))
    found = fused_lora.low_rank_products(x, layers)
    leaves = [x, *(leaf for layer in layers for leaf in (layer.a, layer.b))]
    exact = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
    pairs = zip(exact[1::2], exact[2::2], layers, strict=True)
    wanted = [
        torch.nn.functional.linear(exact[0], layer.weight.to(wide), layer.bias.to(wide))
        + layer.scale * exact[0] @ a.T @ b.T
        for a, b, layer in pairs
    ]
    upstream = [numbers(*y.shape) for y in wanted]
    gradients = (
        torch.autograd.grad(outputs, inputs, [u.to(outputs[0].dtype) for u in upstream])
        for outputs, inputs in ((found, leaves), (wanted, exact))
    )
    for ours, theirs in [*zip(found, wanted, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(ours.to(wide), theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("first", [None, 64, 96])
def test_settled_layers_are_what_the_formula_says(dtype, tolerance, first, quantised, monkeypatch):
    if first is not None:  # as on a GPU
        monkeypatch.setattr(fused_lora, "_first_columns", lambda weight: first)
    torch.manual_seed(0)
    wide = torch.float64

    class Base:
        def __init__(self, weight):
            self.weight = weight

    def numbers(*shape):
        return torch.randn(shape, dtype=wide).to(dtype)

    x, layers = numbers(2, 5, 96), []
    for out, rank, scale, bias in ((12, 4, 0.5, True), (7, 3, 4.0, False)):
        weight = Base(numbers(out, 96)) if quantised else numbers(out, 96)
        a, b = (torch.randn(shape) for shape in ((rank, 96), (out, rank)))  # float32, as they are trained
        layers.append(fused_lora.Operands(weight, numbers(out) if bias else None, a, b, scale))
    settled = fused_lora.Settled(layers)
    with torch.no_grad():
        found = settled(x)
    for ours, layer in zip(found, layers, strict=True):
        assert ours.dtype == dtype
        bias = None if layer.bias is None else layer.bias.to(wide)
        a, b = (factor.to(wide) for factor in (layer.a, layer.b))
        exact = torch.nn.functional.linear(x.to(wide), layer.made().to(wide), bias)
        exact += layer.scale * x.to(wide) @ a.T @ b.T
        torch.testing.assert_close(ours.to(wide), exact, rtol=0, atol=tolerance * float(exact.abs().max()))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_nothing_in_is_nothing_out(shape):
    layer = LoRALinear(torch.nn.Linear(16, 8), LoRASettings(rank=2))
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 8)
    assert not layer.lora_A.grad.any()
    with torch.no_grad(), unchanging(layer):
        assert layer(x).shape == y.shape
