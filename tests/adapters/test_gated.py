"""Gated feed-forward layers with adapters as one node, as on a GPU, with its kernel spelled out in torch."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from whet.adapters import product
from whet.adapters.dora import DoRALinear
from whet.adapters.layer import LoRALinear, LoRASettings
from whet.models.feedforward import FeedForward
from whet.models.spec import FeedForwardSpec
from whet.ops import gated
from whet.ops.planned import planned_for


def spelled_out(gate, up, grad, low, grad_low, rank):
    wide = torch.promote_types(gate.dtype, torch.float32)
    one, two, upstream = (each.to(wide) for each in (gate, up, grad))
    part = torch.sigmoid(one)
    grad_gate = (upstream * two * part * (1 + one * (1 - part))).to(gate.dtype)
    grad_up = (upstream * one * part).to(up.dtype)
    y = (one * part * two).to(gate.dtype)
    pairs = (grad_gate, low[:, :rank]), (grad_up, low[:, rank:]), (y, grad_low)
    return grad_gate, grad_up, torch.cat([a.to(wide).T @ b.to(wide) for a, b in pairs], dim=1)


@pytest.fixture
def calls(monkeypatch):
    found = []

    def kernel(*given):
        found.append(given)
        return spelled_out(*given)

    monkeypatch.setitem(sys.modules, "whet.ops.gated_triton", SimpleNamespace(gated_gradients_on_gpu=kernel))
    monkeypatch.setattr(gated, "suits", lambda x, dtype, ranks: torch.is_grad_enabled())
    return found


class Packed:
    def __init__(self, weight):
        self.weight = weight


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [None, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_outputs_and_gradients_are_those_of_the_formula(
    dtype, tolerance, first, biased, quantised, calls, monkeypatch
):
    if first is not None:  # as on a GPU
        monkeypatch.setattr(product, "_first_columns", lambda weight: first)
    torch.manual_seed(0)
    wide = torch.float64

    def numbers(*shape):
        return (torch.randn(shape, dtype=wide) / 3).to(dtype)

    layers = []
    for out, into, rank, scale in ((40, 24, 4, 0.5), (40, 24, 3, 2.0), (24, 40, 5, 1.5)):
        weight = numbers(out, into)
        a, b = numbers(rank, into).requires_grad_(), numbers(out, rank).requires_grad_()
        bias = numbers(out) if biased else None
        layers.append(product.Operands(Packed(weight) if quantised else weight, bias, a, b, scale))
    x = numbers(2, 5, 24).requires_grad_()
    found = product.low_rank_gated(x, *layers)
    leaves = [x, *(leaf for layer in layers for leaf in (layer.a, layer.b))]
    exact = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]

    def project(x, k):
        layer, a, b = layers[k], exact[1 + 2 * k], exact[2 + 2 * k]
        bias = None if layer.bias is None else layer.bias.to(wide)
        return F.linear(x, layer.made().to(wide), bias) + layer.scale * x @ a.T @ b.T

    wanted = project(F.silu(project(exact[0], 0)) * project(exact[0], 1), 2)
    upstream = numbers(*wanted.shape)
    ours = torch.autograd.grad(found, leaves, upstream)
    theirs = torch.autograd.grad(wanted, exact, upstream.to(wide))
    assert len(calls) == 1
    for one, other in zip([found, *ours], [wanted, *theirs], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.to(wide), other, rtol=0, atol=tolerance * other.abs().max().item())


def layer(kind=LoRALinear, *, activation="silu", dropout=0.0, fused=False, rank=4):
    torch.manual_seed(0)
    made = FeedForward(FeedForwardSpec(width=48, activation=activation, gated=True, fused=fused), d_model=16)
    made.requires_grad_(False)
    for name, module in list(made.named_children()):
        adapter = kind(module, LoRASettings(rank=rank, dropout=dropout))
        torch.nn.init.normal_(adapter.lora_B)
        setattr(made, name, adapter)
    return made


def gradients(made, x):
    y = made(x)
    return [y, *torch.autograd.grad(y.square().sum(), [p for p in made.parameters() if p.requires_grad])]


def test_a_layer_with_adapters_is_as_it_is_without_it(calls, monkeypatch):
    made, x = layer().double(), torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    found = gradients(made, x)
    assert len(calls) == 1
    monkeypatch.setattr(gated, "suits", lambda x, dtype, ranks: False)
    for ours, plain in zip(found, gradients(made, x), strict=True):
        torch.testing.assert_close(ours, plain)
    assert len(calls) == 1


def test_of_what_is_as_wide_as_the_gate_two_tensors_are_kept(calls):
    made, kept = layer(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        made(torch.randn(2, 3, 16, requires_grad=True))
    assert [shape for shape in kept if shape.numel() == 6 * 48] == 2 * [torch.Size((2, 3, 48))]


@pytest.mark.parametrize(
    "made",
    [
        layer(DoRALinear),
        layer(activation="gelu"),
        layer(dropout=0.5),
        layer(fused=True),
    ],
)
def test_what_it_is_not_for(made, calls):
    gradients(made, torch.randn(2, 3, 16, requires_grad=True))
    assert not calls


def test_layers_that_are_off_or_watched_are_called(calls):
    made, x = layer(), torch.randn(2, 3, 16, requires_grad=True)
    made.down_proj.enabled = False
    made(x).sum().backward()
    made.down_proj.enabled = True
    seen = []
    watch = made.up_proj.register_forward_hook(lambda *given: seen.append(given))
    made(x).sum().backward()
    watch.remove()
    with torch.no_grad():
        made(x)
    assert len(seen) == 1
    assert not calls


def test_it_is_for_sixteen_bits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gated, "kernels_work", lambda: True)
    x = torch.randn(3, 16)
    assert not gated.suits(x, torch.bfloat16, (16, 16, 16))
    with planned_for("cuda"):
        assert gated.suits(x, torch.bfloat16, (16, 16, 16))
        assert gated.suits(x, torch.float16, (64, 1, 16))
        assert not gated.suits(x, torch.float32, (16, 16, 16))
        assert not gated.suits(x, torch.bfloat16, (16, 65, 16))
        with torch.no_grad():
            assert not gated.suits(x, torch.bfloat16, (16, 16, 16))


def test_the_compiler_is_told_the_truth(calls):
    torch.manual_seed(0)
    given = *(torch.randn(6, 48) for _ in range(3)), torch.randn(6, 7), torch.randn(6, 5), 4
    torch.library.opcheck(
        torch.ops.whet.gated_gradients.default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_compiled_it_is_one_graph_with_the_same_numbers(calls):
    made, x = layer(), torch.randn(2, 3, 16, requires_grad=True)
    plain = gradients(made, x)
    torch._dynamo.reset()
    made.compile(fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(gradients(made, x), plain, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert len(calls) == 2
