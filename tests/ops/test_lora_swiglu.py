"""SwiGLU layers with LoRA as one autograd function, as on a GPU, with the kernel replaced by PyTorch."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from whet.adapters import fused_lora
from whet.adapters.adapter import LoRASettings, constant_weights
from whet.adapters.layers.dora import DoRALinear
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.layers.pissa import PiSSALinear
from whet.models.feedforward import FeedForward
from whet.models.spec import FeedForwardSpec
from whet.ops.dispatch import plan_for_device
from whet.ops.kernels import lora_swiglu


def with_updates(gate, up, low, b_gate, b_up):
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate, up, low, b_gate, b_up = (each.to(wide) for each in (gate, up, low, b_gate, b_up))
    rank = b_gate.shape[1]
    return gate + low[:, :rank] @ b_gate.T, up + low[:, rank:] @ b_up.T


def plain_output(gate, up, low, b_gate, b_up):
    one, two = with_updates(gate, up, low, b_gate, b_up)
    return (F.silu(one) * two).to(gate.dtype)


def plain_gradients(gate, up, grad, low, b_gate, b_up, grad_low):
    one, two = with_updates(gate, up, low, b_gate, b_up)
    part, grad, rank = torch.sigmoid(one), grad.to(one.dtype), b_gate.shape[1]
    grad_gate = (grad * two * part * (1 + one * (1 - part))).to(gate.dtype)
    grad_up = (grad * one * part).to(up.dtype)
    y = plain_output(gate, up, low, b_gate, b_up)
    pairs = (grad_gate, low[:, :rank]), (grad_up, low[:, rank:]), (y, grad_low)
    return grad_gate, grad_up, torch.cat([a.to(one.dtype).T @ b.to(one.dtype) for a, b in pairs], dim=1)


@pytest.fixture
def calls(monkeypatch):
    calls_made = []

    def kernel(*args):
        calls_made.append(args)
        return plain_gradients(*args)

    kernels = SimpleNamespace(gated_output_on_gpu=plain_output, gated_gradients_on_gpu=kernel)
    monkeypatch.setitem(sys.modules, "whet.ops.kernels.lora_swiglu_triton", kernels)
    monkeypatch.setattr(lora_swiglu, "is_supported", lambda x, dtype, ranks: True)
    return calls_made


class Packed:
    def __init__(self, weight):
        self.weight = weight


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [None, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_outputs_and_gradients_match_the_formula(
    dtype, tolerance, first, biased, quantized, calls, monkeypatch
):
    if first is not None:  # as on a GPU
        monkeypatch.setattr(fused_lora, "_num_leading_columns", lambda weight: first)
    torch.manual_seed(0)
    wide = torch.float64

    def random_tensor(*shape):
        return (torch.randn(shape, dtype=wide) / 3).to(dtype)

    layers = []
    for out, into, rank, scale in ((40, 24, 4, 0.5), (40, 24, 3, 2.0), (24, 40, 5, 1.5)):
        weight = random_tensor(out, into)
        a, b = random_tensor(rank, into).requires_grad_(), random_tensor(out, rank).requires_grad_()
        bias = random_tensor(out) if biased else None
        layers.append(fused_lora.Operands(Packed(weight) if quantized else weight, bias, a, b, scale))
    x = random_tensor(2, 5, 24).requires_grad_()
    output = fused_lora.fused_lora_swiglu(x, *layers)
    leaves = [x, *(leaf for layer in layers for leaf in (layer.a, layer.b))]
    exact = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]

    def project(x, k):
        layer, a, b = layers[k], exact[1 + 2 * k], exact[2 + 2 * k]
        bias = None if layer.bias is None else layer.bias.to(wide)
        return F.linear(x, layer.dense_weight().to(wide), bias) + layer.scale * x @ a.T @ b.T

    expected = project(F.silu(project(exact[0], 0)) * project(exact[0], 1), 2)
    upstream = random_tensor(*expected.shape)
    ours = torch.autograd.grad(output, leaves, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.to(wide))
    assert len(calls) == 1
    for one, other in zip([output, *ours], [expected, *theirs], strict=True):
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


def test_fused_layer_matches_the_unfused_layer(calls, monkeypatch):
    made, x = layer().double(), torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    output = gradients(made, x)
    assert len(calls) == 1
    monkeypatch.setattr(lora_swiglu, "is_supported", lambda x, dtype, ranks: False)
    for ours, plain in zip(output, gradients(made, x), strict=True):
        torch.testing.assert_close(ours, plain)
    assert len(calls) == 1


def test_only_two_full_width_tensors_are_saved_for_backward(calls):
    made, saved_shapes = layer(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_shapes.append(t.shape) or t, lambda t: t):
        made(torch.randn(2, 3, 16, requires_grad=True))
    assert [shape for shape in saved_shapes if shape.numel() == 6 * 48] == 2 * [torch.Size((6, 48))]


@pytest.mark.parametrize(
    "made",
    [
        layer(DoRALinear),
        layer(activation="gelu"),
        layer(dropout=0.5),
        layer(fused=True),
    ],
)
def test_unsupported_layers_do_not_use_the_kernel(made, calls):
    gradients(made, torch.randn(2, 3, 16, requires_grad=True))
    assert not calls


def test_disabled_or_hooked_layers_are_called_directly(calls):
    made, x = layer(), torch.randn(2, 3, 16, requires_grad=True)
    made.down_proj.enabled = False
    made(x).sum().backward()
    made.down_proj.enabled = True
    seen = []
    hook = made.up_proj.register_forward_hook(lambda *args: seen.append(args))
    made(x).sum().backward()
    hook.remove()
    assert len(seen) == 1
    hook = made.gate_proj.register_full_backward_hook(lambda *args: seen.append(args))
    made(x).sum().backward()
    hook.remove()
    assert len(seen) == 2
    assert not calls


def test_no_grad_output_is_bit_identical_and_decoding_uses_another_path(calls, monkeypatch):
    made, x = layer().bfloat16(), torch.randn(2, 3, 16).bfloat16()
    seen = []
    monkeypatch.setattr(
        sys.modules["whet.ops.kernels.lora_swiglu_triton"],
        "gated_output_on_gpu",
        lambda *args: seen.append(args) or plain_output(*args),
    )
    trained = made(x)
    with torch.no_grad():
        assert torch.equal(made(x), trained)
        assert len(seen) == 2
        with constant_weights(made):
            torch.testing.assert_close(made(x), trained, rtol=0.1, atol=0.1)
    assert len(seen) == 2


def test_kernels_support_16_bit_dtypes_on_a_gpu(monkeypatch):
    monkeypatch.setattr(lora_swiglu, "can_build_kernels", lambda: True)
    x = torch.randn(3, 16)
    assert not lora_swiglu.is_supported(x, torch.bfloat16, (16, 16, 16))
    with plan_for_device("cuda"):
        assert lora_swiglu.is_supported(x, torch.bfloat16, (16, 16, 16))
        assert lora_swiglu.is_supported(x, torch.float16, (32, 1, 16))
        assert not lora_swiglu.is_supported(x, torch.float32, (16, 16, 16))
        assert not lora_swiglu.is_supported(x, torch.bfloat16, (16, 33, 16))


def test_ranks_passed_are_those_of_the_matmuls(monkeypatch):
    """PiSSA's ranks are twice those of its settings."""
    ranks_seen = []
    monkeypatch.setattr(lora_swiglu, "is_supported", lambda x, dtype, ranks: ranks_seen.append(ranks))
    layer(PiSSALinear)(torch.randn(2, 3, 16))
    assert ranks_seen == [(8, 8, 8)]


def test_plan_includes_the_partial_sums():
    """[1,000 rows, 96 columns]: two column blocks, 32 rows per program."""
    with plan_for_device("cuda"):
        rows_per_program, sums = lora_swiglu.partial_sums(
            torch.empty(1000, 96), torch.empty(1000, 7), torch.empty(1000, 5)
        )
    assert (rows_per_program, sums.shape, sums.dtype) == (32, (32, 96, 12), torch.float32)
    rows_per_program, sums = lora_swiglu.partial_sums(
        torch.empty(0, 96), torch.empty(0, 7), torch.empty(0, 5)
    )
    assert sums.shape == (0, 96, 12)


def test_fake_implementations_match_the_operations(calls):
    torch.manual_seed(0)
    gate, up, grad, low, b_gate, b_up, grad_low = (
        torch.randn(shape) for shape in ((6, 48), (6, 48), (6, 48), (6, 7), (48, 4), (48, 3), (6, 5))
    )
    ops = torch.ops.whet
    for op, args in (
        (ops.gated_output, (gate, up, low, b_gate, b_up)),
        (ops.gated_gradients, (gate, up, grad, low, b_gate, b_up, grad_low)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_compiled_layer_is_one_graph_with_equal_gradients(calls):
    made, x = layer(), torch.randn(2, 3, 16, requires_grad=True)
    plain = gradients(made, x)
    torch._dynamo.reset()
    made.compile(fullgraph=True, backend="aot_eager")
    for ours, expected in zip(gradients(made, x), plain, strict=True):
        torch.testing.assert_close(ours, expected)
    assert len(calls) == 2
