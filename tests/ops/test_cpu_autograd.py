"""The explicit backward passes match autograd, and models use them for the supported dtypes."""

import pytest
import torch
import torch.nn.functional as F

from whet.models.feedforward import FeedForward
from whet.models.norms import RMSNorm
from whet.models.rope import apply_rope
from whet.models.spec import FeedForwardSpec
from whet.ops.kernels import cpu_autograd


def random_tensor(*shape, seed=0, dtype=torch.float64):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def angles(positions, size):
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * torch.rand(size // 2, dtype=torch.float64)
    return (torch.cat((part, part), -1)[None, None] for part in (angle.cos(), angle.sin()))


def plain_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * weight


def plain_rotation(x, cos, sin):
    half = x.shape[-1] // 2
    return torch.cat(
        (
            x[..., :half] * cos[..., :half] - x[..., half:] * sin[..., :half],
            x[..., half:] * cos[..., half:] + x[..., :half] * sin[..., half:],
        ),
        -1,
    )


def assert_same_gradients(output, expected, inputs):
    upstream = random_tensor(*output.shape, seed=9).detach()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(output, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_rms_norm_and_its_gradients():
    x, weight = random_tensor(2, 3, 8), random_tensor(8, seed=1)
    assert_same_gradients(cpu_autograd.rms_norm(x, weight, 1e-5), plain_norm(x, weight), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b: cpu_autograd.rms_norm(a, b, 1e-5), (x, weight))


def test_frozen_weight_or_input_gets_no_gradient():
    x, weight = random_tensor(3, 8), random_tensor(8, seed=1)
    cpu_autograd.rms_norm(x, weight.detach(), 1e-5).sum().backward()
    assert x.grad is not None
    cpu_autograd.rms_norm(x.detach(), weight, 1e-5).sum().backward()
    torch.testing.assert_close(
        weight.grad, torch.autograd.grad(plain_norm(x.detach(), weight).sum(), weight)[0]
    )


def test_rotation_and_its_gradient_for_transposed_heads():
    x = random_tensor(2, 5, 3, 8)  # [B, T, heads, D] in memory
    cos, sin = angles(5, 8)
    heads = x.transpose(1, 2)
    assert_same_gradients(cpu_autograd.rotate(heads, cos, sin), plain_rotation(heads, cos, sin), (x,))


def test_silu_gate_and_its_gradients():
    gate, up = random_tensor(2, 3, 8), random_tensor(2, 3, 8, seed=1)
    assert_same_gradients(cpu_autograd.silu_gate(gate, up), gate * torch.sigmoid(gate) * up, (gate, up))


def test_fewer_tensors_are_saved_for_backward_than_by_autograd():
    def saved_elements(function):
        sizes = {}

        def count(tensor):
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            result = function()
        sizes.pop(result.data_ptr(), None)
        return sum(sizes.values())

    gate, up = random_tensor(64, 8), random_tensor(64, 8, seed=1)
    assert saved_elements(lambda: cpu_autograd.silu_gate(gate, up)) == 2 * 64 * 8
    assert saved_elements(lambda: F.silu(gate) * up) == 3 * 64 * 8


@pytest.mark.parametrize(
    ("dtype", "used"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_models_use_them_only_in_float32_and_float64(dtype, used, monkeypatch):
    called = []
    for name in ("rms_norm", "rotate", "silu_gate"):
        original = getattr(cpu_autograd, name)
        spy = lambda *a, name=name, original=original: called.append(name) or original(*a)  # noqa: E731
        monkeypatch.setattr(cpu_autograd, name, spy)
    layers = FeedForward(FeedForwardSpec(width=8, activation="silu", gated=True), d_model=4).to(dtype)
    norm = RMSNorm(4, eps=1e-5).to(dtype)
    x = random_tensor(2, 3, 4, dtype=dtype)
    norm(x)
    apply_rope(x[:, None], *(part.to(dtype) for part in angles(3, 4)))
    layers(x)
    assert called == (["rms_norm", "rotate", "silu_gate"] if used else [])


def test_rms_norm_matches_the_plain_norm_with_mixed_dtypes():
    norm = RMSNorm(8, eps=1e-5)
    x = random_tensor(3, 8, dtype=torch.float32)
    plain = norm.double()(x)  # a float64 weight with a float32 input is not supported
    torch.testing.assert_close(cpu_autograd.rms_norm(x, norm.weight.float(), 1e-5), plain)
