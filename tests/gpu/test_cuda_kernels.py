"""whet's Triton kernels match plain PyTorch; skipped without a CUDA device."""

import copy

import pytest
import torch

import whet
from tiny import run_config
from whet.adapters.adapter import LoRASettings
from whet.adapters.layers.lora_linear import LoRALinear
from whet.generation.engine import complete, generate_tokens
from whet.models.feedforward import FeedForward
from whet.models.norms import OffsetRMSNorm, RMSNorm
from whet.models.rope import apply_rope, rope_cos_sin
from whet.models.spec import FeedForwardSpec
from whet.ops.dispatch import can_build_kernels
from whet.ops.kernels import fused_decode, lora_swiglu
from whet.ops.kernels.lora_swiglu import gated_gradients, gated_output
from whet.ops.lm_head import Head
from whet.ops.log_softmax import token_losses
from whet.training.optim import adamw
from whet.training.optim.adamw import AdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}


def weights(dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_update_of_large_tensors_is_as_accurate_as_torch(dtype, divisor, monkeypatch):
    monkeypatch.setattr(adamw, "_MIN_NUMEL", 1000)
    ours, theirs = (weights(dtype, (1000, 1001), (7,)) for _ in range(2))
    exact = [p.detach().double().requires_grad_() for p in ours]
    optimizer, torch_optimizer = (
        kind(p, fused=True, **SETTINGS) for kind, p in ((AdamW, ours), (torch.optim.AdamW, theirs))
    )
    formula = torch.optim.AdamW(exact, **SETTINGS)
    for step in range(4):
        torch.manual_seed(step)
        for a, b, c in zip(ours, theirs, exact, strict=True):
            a.grad = torch.randn_like(a)
            b.grad, c.grad = a.grad.clone(), a.grad.double() / (divisor or 1.0)
        for optim in (optimizer, torch_optimizer):
            optim.grad_scale = None if divisor is None else torch.tensor(divisor, device="cuda")
            optim.found_inf = torch.tensor(float(step == 2), device="cuda")  # a skipped step
            optim.step()
        if step != 2:
            formula.step()
        assert all(p.grad is not None for p in ours)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert optimizer.state[a]["step"].item() == torch_optimizer.state[b]["step"].item() == 3
        for key in (None, "exp_avg", "exp_avg_sq"):
            ours_state, torch_state, exact_state = (
                p if key is None else optim.state[p][key]
                for optim, p in ((optimizer, a), (torch_optimizer, b), (formula, c))
            )
            assert (ours_state - exact_state).norm() <= 1.05 * (
                torch_state - exact_state
            ).norm() + 1e-7 * exact_state.norm()
    optimizer.load_state_dict(torch_optimizer.state_dict())


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# relative size of the last digit; float32 allows for sums in two orders
DIGIT = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def assert_equal_to_the_last_digit(output, plain):
    """Assert equality up to the last digit, which sums in another order may change now and then."""
    assert output.dtype == plain.dtype
    assert output.shape == plain.shape
    digit = DIGIT[output.dtype]
    torch.testing.assert_close(output, plain, rtol=2 * digit, atol=digit * 2.0**-8)
    if output.dtype != torch.float32:
        assert (output != plain).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm])
@pytest.mark.parametrize("size", [8, 64, 576, 2048, 5000])
def test_fused_norm_matches_the_plain_norm(size, kind, dtype):
    torch.manual_seed(0)
    norm = kind(size, eps=1e-5).to("cuda", dtype)
    torch.nn.init.normal_(norm.weight)
    wide = torch.randn(2, 3, 7, 2 * size, device="cuda").to(dtype) * 3
    for x in (wide[..., :size].contiguous(), wide[..., size:], wide[..., :size].transpose(1, 2)):
        with torch.no_grad(), fused_decode.fused_decoding():
            output = norm(x)
        assert output.grad_fn is None
        assert_equal_to_the_last_digit(output, norm(x).detach())
    if dtype != torch.float32:  # float32 weights with 16-bit hidden states
        norm.float()
        with torch.no_grad(), fused_decode.fused_decoding():
            output = norm(wide[..., :size])
        assert_equal_to_the_last_digit(output, norm(wide[..., :size]).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 24, 64, 128])
def test_fused_rotation_matches_the_plain_rotation(size, dtype):
    torch.manual_seed(0)
    x = (
        torch.randn(3, 5, 2, size + 8, device="cuda").to(dtype).transpose(1, 2)[..., 8:]
    )  # a strided part of each head
    positions = torch.stack([torch.arange(5), torch.arange(5) + 100, torch.arange(5) * 7]).cuda()
    frequencies = torch.rand(size // 2, device="cuda")
    for rope_positions in (positions, positions[:1]):
        for kind in (dtype, torch.float32):
            cos, sin = (tensor.to(kind) for tensor in rope_cos_sin(rope_positions, frequencies))
            plain = apply_rope(x, cos, sin)
            with torch.no_grad(), fused_decode.fused_decoding():
                output = apply_rope(x, cos, sin)
            assert output.dtype == plain.dtype
            # in 16 bits every product is rounded; in 32 bits one may be fused with the addition
            exact = plain.dtype != torch.float32
            torch.testing.assert_close(output, plain, rtol=0, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused_weights", [False, True])
@pytest.mark.parametrize("width", [24, 1536, 1100])
def test_fused_gate_matches_the_plain_gate(width, fused_weights, dtype):
    torch.manual_seed(0)
    layer = FeedForward(FeedForwardSpec(width=width, fused=fused_weights), d_model=32).to("cuda", dtype)
    layer.down_proj = torch.nn.Identity()
    x = 8 * torch.randn(3, 7, 32, device="cuda").to(dtype)
    with torch.no_grad(), fused_decode.fused_decoding():
        output = layer(x)
    assert_equal_to_the_last_digit(output, layer(x).detach())


def test_fused_kernels_are_only_for_decoding_without_gradients():
    x = torch.ones(2, 8, device="cuda")
    assert not fused_decode.is_supported(x)
    with torch.no_grad():
        assert not fused_decode.is_supported(x)
    with torch.no_grad(), fused_decode.fused_decoding():
        assert fused_decode.is_supported(x, x.bfloat16())
        assert not fused_decode.is_supported(x, x.cpu())
        assert not fused_decode.is_supported(x.double())
    with fused_decode.fused_decoding():
        assert not fused_decode.is_supported(x)
    assert RMSNorm(8, eps=1e-5).cuda()(x).requires_grad


def test_decoding_with_fused_kernels_matches_plain_decoding(tiny_directory, monkeypatch):
    model, _ = whet.load(tiny_directory, dtype=torch.bfloat16, device="cuda")
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    settings = {"max_tokens": 24, "stop_tokens": set(), "seeds": [0, 1, 2]}
    output = complete(model, prompts, **settings)
    monkeypatch.setattr(fused_decode, "is_supported", lambda *tensors: False)
    plain = complete(model, prompts, **settings)
    compared = 0
    for ours, theirs in zip(output, plain, strict=True):
        equal_tokens = next((n for n in range(24) if ours.tokens[n] != theirs.tokens[n]), 24)
        compared += equal_tokens
        torch.testing.assert_close(
            torch.tensor(ours.logprobs[:equal_tokens]),
            torch.tensor(theirs.logprobs[:equal_tokens]),
            rtol=0,
            atol=0.05,
        )
    assert compared > 24


def test_plain_pytorch_is_used_without_a_compiler(tiny_directory, tmp_path, monkeypatch, caplog):
    """Without a C compiler, users see one warning, and everything works."""
    from whet.ops.kernels import fused_decode_triton

    def broken(*tensors):
        raise RuntimeError("Failed to find C compiler.\nPlease specify it")

    settings = {"max_tokens": 8, "stop_tokens": set()}
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cuda")
    expected = generate_tokens(model, [[5, 6, 7]], **settings)
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 50, device="cuda"), torch.arange(6, device="cuda")
    head = Head(torch.zeros(50, 4, device="cuda"))
    losses = token_losses(logits.clone(), targets, head)
    assert can_build_kernels()
    monkeypatch.setattr(fused_decode_triton, "silu_gate_on_gpu", broken)
    can_build_kernels.cache_clear()
    try:
        assert generate_tokens(model, [[5, 6, 7]], **settings) == expected
        for ours, theirs in zip(token_losses(logits.clone(), targets, head), losses, strict=True):
            torch.testing.assert_close(ours, theirs)
        whet.train(run_config(tiny_directory, tmp_path, run={"device": "cuda"}))
        assert not can_build_kernels()
    finally:
        can_build_kernels.cache_clear()
    assert [line for line in caplog.messages if "Triton" in line] == [
        "Triton cannot build kernels on this machine (Failed to find C compiler.): "
        "using slower plain PyTorch instead"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (4, 7, 3), (32, 1, 19)])
@pytest.mark.parametrize("shape", [(1, 16), (37, 131), (3000, 200), (4096, 1536)])
def test_gate_with_adapters_and_its_gradients_are_exact(shape, ranks, dtype):
    torch.manual_seed(0)
    count, size = shape

    def random_tensor(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    gate, up, grad = (random_tensor(count, size) for _ in range(3))
    low, b_gate, b_up = (
        random_tensor(count, ranks[0] + ranks[1]),
        random_tensor(size, ranks[0]),
        random_tensor(size, ranks[1]),
    )
    forward, backward = (
        (gate, up, low, b_gate, b_up),
        (gate, up, grad, low, b_gate, b_up, random_tensor(count, ranks[2])),
    )
    output = [gated_output(*forward), *gated_gradients(*backward)]
    for repeated, first in zip([gated_output(*forward), *gated_gradients(*backward)], output, strict=True):
        assert torch.equal(repeated, first)
    gate, up, grad, low, b_gate, b_up, grad_low = (tensor.double() for tensor in backward)
    gate, up = gate + low[:, : ranks[0]] @ b_gate.T, up + low[:, ranks[0] :] @ b_up.T
    part = torch.sigmoid(gate)
    exact = gate * part * up, grad * up * part * (1 + gate * (1 - part)), grad * gate * part
    for ours, expected in zip(output[:3], exact, strict=True):  # rounded once, after accumulation in float32
        assert ((ours - expected).abs() <= torch.finfo(dtype).eps * (expected.abs() + 1e-2)).all()
    # the factors of the sums are rounded, as in a matmul
    wide = output[1].double(), output[2].double(), output[0].double()
    narrow = low[:, : ranks[0]], low[:, ranks[0] :], grad_low
    sums = torch.cat([a.T @ b for a, b in zip(wide, narrow, strict=True)], dim=1)
    assert (output[3] - sums).abs().amax() < 1e-4 * sums.abs().amax()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_feed_forward_with_adapters_is_as_accurate_as_separate_layers(dtype, compiled, monkeypatch):
    torch.manual_seed(0)
    template = FeedForward(FeedForwardSpec(width=1100, activation="silu", gated=True), d_model=256).cuda()
    template.requires_grad_(False)
    for name, module in list(template.named_children()):
        setattr(template, name, LoRALinear(module.to(dtype), LoRASettings(rank=16)))
        torch.nn.init.normal_(getattr(template, name).lora_B, std=0.05)
    x, upstream = (torch.randn(4, 500, 256, device="cuda").to(dtype) for _ in range(2))

    def gradients(model, x):
        leaves = [x.requires_grad_(), *(p for p in model.parameters() if p.requires_grad)]
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))]

    exact = gradients(copy.deepcopy(template).double(), x.detach().double())
    errors = {}
    for fused in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(lora_swiglu, "_MAX_RANK", 32 if fused else 0)
        model = copy.deepcopy(template)
        if compiled:
            model.compile(fullgraph=True, dynamic=True)
        output = gradients(model, x.detach())
        errors[fused] = [((a - b).norm() / b.norm()).item() for a, b in zip(output, exact, strict=True)]
    for ours, plain in zip(errors[True], errors[False], strict=True):
        assert ours < 1.1 * plain + 1e-4
