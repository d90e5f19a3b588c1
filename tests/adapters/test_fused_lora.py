"""The fused LoRA operations: their fake implementations, their formulas and their gradients."""

import pytest
import torch

from whet.adapters import fused_lora
from whet.adapters.adapter import LoRASettings, constant_weights
from whet.adapters.layers.lora_linear import LoRALinear


@pytest.mark.parametrize("rows", [1, 8, 30, 60])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_leading", [0, 5, 16])
def test_lora_output_matches_its_fake_implementation(rows, biased, num_leading):
    torch.manual_seed(0)
    flat, weight, low, b = (torch.randn(shape) for shape in ((rows, 16), (12, 16), (rows, 4), (12, 4)))
    bias = torch.randn(12) if biased else None
    prefixed_low, prefixed_b = (
        torch.cat(pair, dim=1) for pair in ((flat[:, :num_leading], low), (weight[:, :num_leading], b))
    )
    arguments = (flat, weight, bias, prefixed_low, prefixed_b, num_leading, True)
    torch.library.opcheck(
        torch.ops.whet.lora_output.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    expected = flat @ weight.T + low @ b.T + (0 if bias is None else bias)
    torch.testing.assert_close(fused_lora.lora_output(*arguments), expected)


def test_lora_input_gradient_matches_its_fake_implementation():
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
def test_only_the_update_reads_the_input_after_dropout(biased):
    torch.manual_seed(0)

    def random_tensor(*shape, train=True):
        return torch.randn(shape, dtype=torch.float64, requires_grad=train)

    weight, bias = random_tensor(12, 16, train=False), random_tensor(12, train=False) if biased else None
    leaves = x, update_input, a, b = (
        random_tensor(2, 5, 16),
        random_tensor(2, 5, 16),
        random_tensor(4, 16),
        random_tensor(12, 4),
    )
    operands = fused_lora.Operands(weight, bias, a, b, 0.5)
    [actual] = fused_lora.fused_lora_outputs(x, [operands], update_input)
    expected = torch.nn.functional.linear(x, weight, bias) + 0.5 * update_input @ a.T @ b.T
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, leaves, upstream) for y in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scales", [(2.0, 2.0), (0.5, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("num_leading", [None, 64, 96])
def test_fused_layers_match_the_formula(dtype, tolerance, scales, num_leading, monkeypatch):
    if num_leading is not None:  # as on a GPU
        monkeypatch.setattr(fused_lora, "_num_leading_columns", lambda weight: num_leading)
    torch.manual_seed(0)
    wide = torch.float64

    def random_tensor(*shape):
        return torch.randn(shape, dtype=wide).to(dtype)

    x = random_tensor(2, 5, 96).requires_grad_()
    layers = []
    for out, rank, scale in zip((12, 7), (4, 3), scales, strict=True):
        a, b = random_tensor(rank, 96).requires_grad_(), random_tensor(out, rank).requires_grad_()
        layers.append(fused_lora.Operands(random_tensor(out, 96), random_tensor(out), a, b, scale))
    actual = fused_lora.fused_lora_outputs(x, layers)
    leaves = [x, *(leaf for layer in layers for leaf in (layer.a, layer.b))]
    exact = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
    pairs = zip(exact[1::2], exact[2::2], layers, strict=True)
    expected = [
        torch.nn.functional.linear(exact[0], layer.weight.to(wide), layer.bias.to(wide))
        + layer.scale * exact[0] @ a.T @ b.T
        for a, b, layer in pairs
    ]
    upstream = [random_tensor(*y.shape) for y in expected]
    gradients = (
        torch.autograd.grad(outputs, inputs, [u.to(outputs[0].dtype) for u in upstream])
        for outputs, inputs in ((actual, leaves), (expected, exact))
    )
    for ours, theirs in [*zip(actual, expected, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(ours.to(wide), theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("num_leading", [None, 64, 96])
def test_prepared_layers_match_the_formula(dtype, tolerance, num_leading, quantized, monkeypatch):
    if num_leading is not None:  # as on a GPU
        monkeypatch.setattr(fused_lora, "_num_leading_columns", lambda weight: num_leading)
    torch.manual_seed(0)
    wide = torch.float64

    class Base:
        def __init__(self, weight):
            self.weight = weight

    def random_tensor(*shape):
        return torch.randn(shape, dtype=wide).to(dtype)

    x, layers = random_tensor(2, 5, 96), []
    for out, rank, scale, bias in ((12, 4, 0.5, True), (7, 3, 4.0, False)):
        weight = Base(random_tensor(out, 96)) if quantized else random_tensor(out, 96)
        a, b = (torch.randn(shape) for shape in ((rank, 96), (out, rank)))  # float32, as they are trained
        layers.append(fused_lora.Operands(weight, random_tensor(out) if bias else None, a, b, scale))
    prepared = fused_lora.PreparedLayers(layers)
    with torch.no_grad():
        actual = prepared(x)
    for ours, layer in zip(actual, layers, strict=True):
        assert ours.dtype == dtype
        bias = None if layer.bias is None else layer.bias.to(wide)
        a, b = (factor.to(wide) for factor in (layer.a, layer.b))
        exact = torch.nn.functional.linear(x.to(wide), layer.dense_weight().to(wide), bias)
        exact += layer.scale * x.to(wide) @ a.T @ b.T
        torch.testing.assert_close(ours.to(wide), exact, rtol=0, atol=tolerance * float(exact.abs().max()))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_empty_input_gives_empty_output(shape):
    layer = LoRALinear(torch.nn.Linear(16, 8), LoRASettings(rank=2))
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 8)
    assert not layer.lora_A.grad.any()
    with torch.no_grad(), constant_weights(layer):
        assert layer(x).shape == y.shape
