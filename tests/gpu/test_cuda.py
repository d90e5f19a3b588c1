"""Tests that need a CUDA device; skipped without one."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import whet
from tiny import random_examples, run_config
from whet.adapters.adapter import LoRASettings, constant_weights, named_adapters
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.nf4 import dequantize_nf4, quantize_nf4
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream, make_batch
from whet.data.packing import StepSettings
from whet.generation.cuda_graph import StaticDecodeBatch
from whet.generation.engine import complete, generate_tokens
from whet.generation.sampling import Sampling
from whet.hardware import choose_precision
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.moe import moe_layers
from whet.objectives.router_losses import RoutedObjective
from whet.objectives.sft import SFT
from whet.ops.attention import Layout, attend
from whet.ops.grouped_experts import expert_loop_linear, grouped_linear, grouped_mm_problem
from whet.ops.lm_head import Head
from whet.ops.log_softmax import token_losses
from whet.training.callbacks import Callback, StopRun
from whet.training.optim import adamw
from whet.training.router_balancing import RouterMetrics
from whet.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_packed_documents_match_separate_documents(tiny_directory, dtype, tolerance):
    model, _ = whet.load(tiny_directory, dtype=dtype, device=CUDA)
    examples = random_examples(5, seed=1)
    batch = make_batch([examples[:2], examples[2:]]).to(CUDA)
    with torch.no_grad():
        packed = model.hidden(batch.tokens, batch.positions, batch.layout()).float()
        for row, group in enumerate((examples[:2], examples[2:])):
            start = 0
            for example in group:
                separate = model.hidden(torch.tensor([example.tokens[:-1]], device=CUDA)).float()
                torch.testing.assert_close(
                    packed[row, start : start + example.length], separate[0], rtol=0, atol=tolerance
                )
                start += example.length


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_packed_rows_use_varlen_attention_in_16_bit_runs(tiny_directory, precision, method, monkeypatch):
    """With trained float32 weights, RoPE returns float32 queries, which must not cause a dense mask."""
    run = trainer(tiny_directory, precision, method, "adamw")
    monkeypatch.setattr(Layout, "document_mask", lambda layout, device: pytest.fail("a dense mask was built"))
    run.step([make_batch([random_examples(5, seed=1)])])


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("narrow", [False, True])
def test_packed_attention_matches_the_formula(window, dtype, tolerance, narrow):
    torch.manual_seed(0)
    documents = ((7, 30, 1, 26), (64,))
    q, k, v = (
        torch.randn(2, heads, 64, size, device=CUDA, dtype=dtype, requires_grad=True)
        for heads, size in ((4, 16), (2, 16), (2, 8 if narrow else 16))
    )
    layout = Layout.packed(documents, device=CUDA)
    output = attend(q, k, v, layout, window=window)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, (q, k, v), upstream)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    positions = torch.arange(64, device=CUDA)
    visible = (positions[:, None] >= positions) & (positions[:, None] - positions < (window or 64))
    segments = [
        torch.repeat_interleave(torch.arange(len(row), device=CUDA), torch.tensor(row, device=CUDA))
        for row in documents
    ]
    mask = torch.stack([visible & (row[:, None] == row) for row in segments])[:, None]
    keys, values = (t.repeat_interleave(2, dim=1) for t in wide[1:])
    scores = (wide[0] @ keys.mT / 4).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    for ours, exact_grad in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact_grad, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("biased", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, 3.0)])
@pytest.mark.parametrize("columns", [100, 8192, 20_001])
def test_loss_kernel_matches_the_formula(dtype, weighted, biased, scale, softcap, columns):
    torch.manual_seed(0)
    projected = 3 * torch.randn(17, columns, device=CUDA, dtype=dtype)
    targets = torch.randint(0, columns, (17,), device=CUDA)
    token_weights = torch.rand(17, device=CUDA) if weighted else None
    bias = torch.randn(columns, device=CUDA, dtype=dtype) if biased else None
    head = Head(projected, bias, scale, softcap)
    wide = projected.double().requires_grad_()
    logits = head.transform(wide if bias is None else wide + bias.double())
    expected = F.cross_entropy(logits, targets, reduction="none")
    (grad,) = torch.autograd.grad(
        (expected * (1 if token_weights is None else token_weights.double())).sum(), wide
    )
    losses, output_grad = token_losses(projected, targets, head, token_weights=token_weights)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        output_grad.double(), grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6
    )


def trainer(tiny_directory, precision, method="lora", optimizer="adamw"):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    chosen = choose_precision(precision, CUDA)
    model, _ = whet.load(
        tiny_directory, dtype=chosen.frozen if method == "lora" else chosen.trained, device=CUDA
    )
    if method == "lora":
        whet.attach_lora(model, rank=4)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(chosen.trained)
    keys = {"run": {"device": "cuda", "precision": precision}, "optim": {"name": optimizer}}
    config = validate_config(run_config(tiny_directory, ".", **keys))
    settings = StepSettings(4, None, 128, pack=True)
    return Trainer(model, SFT(), BatchStream(random_examples(20), settings, seed=0), config, precision=chosen)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_loss_decreases_in_every_precision(tiny_directory, precision, method):
    run = trainer(tiny_directory, precision, method)
    expected = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert all(p.dtype == expected for p in run.trained)
    batch = next(run.stream)
    losses = [run.step(batch)["loss"] for _ in range(25)]
    assert losses[-1] < losses[0] - 0.5


def test_bf16_gradients_have_the_direction_of_fp32_gradients(tiny_directory):
    gradients = []
    for precision in ("fp32", "bf16"):
        run = trainer(tiny_directory, precision, "full")
        grads = []
        run.optimizer.register_step_pre_hook(
            lambda *_, run=run, grads=grads: grads.extend(p.grad.flatten().float().cpu() for p in run.trained)
        )
        run.step(next(run.stream))
        gradients.append(torch.cat(grads))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(240, 64, 192), (240, 576, 1536), (4096, 2048, 2048)])
def test_small_adapter_update_is_not_lost_in_16_bits(rows, width, out, bias, settled):
    """The update is complete in the mean, and the output error is close to that of a single rounding."""
    torch.manual_seed(0)
    base = torch.nn.Linear(width, out, bias=bias, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
    layer = LoRALinear(base, LoRASettings(8, 16.0))
    layer.lora_B.data = 3e-4 * torch.randn_like(layer.lora_B)
    x = torch.randn(rows, width, device=CUDA).bfloat16()
    exact = F.linear(x.double(), *(p.double() for p in base.parameters()))
    change = x.double() @ layer.delta_weight().double().T
    with torch.no_grad(), constant_weights(layer) if settled else contextlib.nullcontext():
        output = layer(x).double()
    share = ((output - exact) * change).sum() / change.square().sum()
    rounding_error = (exact.bfloat16() - exact).square().mean().sqrt()
    assert abs(share.item() - 1) < 0.02 + 4 * (rounding_error / change.square().sum().sqrt()).item()
    assert (output - exact - change).square().mean().sqrt() < 1.8 * rounding_error


OPTIMIZERS = ["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_non_finite_step_is_masked_on_the_device(tiny_directory, optimizer):
    run = trainer(tiny_directory, "bf16", "full", optimizer)
    run.step(next(run.stream))
    before = [p.detach().clone() for p in run.trained]
    original = run.objective.loss
    run.objective.loss = lambda model, batch: type(r := original(model, batch))(
        {"loss": r.sums["loss"] * math.nan}
    )
    with pytest.raises(whet.WhetError, match="the update was skipped, the weights are unchanged"):
        run.step(next(run.stream))
    assert all(torch.equal(a, b) for a, b in zip(before, run.trained, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_does_not_synchronize_before_its_metrics_are_read(tiny_directory, monkeypatch, optimizer):
    step_without_synchronization(trainer(tiny_directory, "bf16", "full", optimizer), monkeypatch)


def step_without_synchronization(run, monkeypatch):
    """Run a step in which a device synchronization is an error, except for the final read of the metrics."""
    monkeypatch.setattr(adamw, "_MIN_NUMEL", 1000)  # whet's kernel, and torch's for the smallest tensors
    run.step(next(run.stream))
    batches = [batch.to(CUDA) for batch in next(run.stream)]
    original = torch.Tensor.cpu

    def read(tensor):
        torch.cuda.set_sync_debug_mode("default")
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def experts_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts") / "model"
    whet.save(new_decoder(preset_spec("nano-moe", layers=2, vocab_size=260), seed=0), None, directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_expert_matmuls_match_the_loop(dtype):
    if (problem := grouped_mm_problem("cuda", dtype, (64, 32))) is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    x = torch.randn(100, 32, device=CUDA, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, 64, 32, device=CUDA, dtype=dtype, requires_grad=True)
    ends = torch.tensor([13, 13, 50, 99, 100], device=CUDA, dtype=torch.int32)  # groups of arbitrary sizes
    upstream = torch.randn(100, 64, device=CUDA, dtype=dtype)
    output, expected = grouped_linear(x, weight, ends), expert_loop_linear(x, weight, ends)
    pairs = [(output, expected)]
    pairs += zip(
        torch.autograd.grad(output, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    )
    for a, b in pairs:
        assert (a.float() - b.float()).norm() <= (
            1e-2 if dtype == torch.bfloat16 else 1e-5
        ) * b.float().norm()


def test_router_metrics_do_not_synchronize(experts_directory, monkeypatch):
    if (problem := grouped_mm_problem("cuda", torch.bfloat16, (128, 176))) is not None:
        pytest.skip(problem)
    run = trainer(experts_directory, "bf16", "full")
    run.objective = RoutedObjective(SFT(), moe_layers(run.model), load_balancing=0.01, z_loss=0.01)
    step_without_synchronization(run, monkeypatch)
    metrics = run.step(next(run.stream))
    RouterMetrics(moe_layers(run.model), [0, 1]).on_step_end(1, metrics)
    assert sum(metrics["per_expert_share"]) == pytest.approx(1, abs=1e-4)


def test_generation_matches_the_cpu(tiny_directory):
    prompts = [example.tokens for example in random_examples(5, seed=1)]
    completions = [
        generate_tokens(
            whet.load(tiny_directory, dtype=torch.float32, device=device)[0],
            prompts,
            max_tokens=20,
            stop_tokens=set(),
        )
        for device in ("cpu", "cuda")
    ]
    assert completions[0] == completions[1]


@pytest.mark.parametrize("adapter", [None, "lora", "dora"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graphs_match_the_cpu(tiny_directory, monkeypatch, temperature, adapter):
    """Including rows that end early, penalties and adapters. Only the first step of a shape runs without a graph."""
    steps = []
    original = StaticDecodeBatch.step
    monkeypatch.setattr(
        StaticDecodeBatch, "step", lambda self: (steps.append(len(self._token)), original(self))
    )
    prompts = [example.tokens for example in random_examples(8, seed=1)]
    completions = []
    for device in ("cpu", "cuda"):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device=device)
        if adapter:
            whet.attach_lora(model, rank=4, variant=adapter)
            generator = torch.Generator().manual_seed(1)
            for _, layer in named_adapters(model):
                for weight in (
                    layer.lora_A,
                    layer.lora_B,
                ):  # devices draw different values from the same seed
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        sampling = Sampling(temperature, top_k=100, top_p=0.95, repetition_penalty=1.1)
        completions.append(
            complete(
                model,
                prompts,
                max_tokens=60,
                stop_tokens=range(0, 260, 20),
                sampling=sampling,
                seeds=range(8),
            )
        )
    assert [row.tokens for row in completions[0]] == [row.tokens for row in completions[1]]
    for on_cpu, on_gpu in zip(*completions, strict=True):
        torch.testing.assert_close(
            torch.tensor(on_cpu.logprobs), torch.tensor(on_gpu.logprobs), rtol=0, atol=1e-3
        )
    assert len(steps) == 2 * len(set(steps)), "each number of rows has one warm-up step and one captured step"


def test_failed_graph_capture_falls_back_to_eager_decoding(tiny_directory, monkeypatch, caplog):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cuda")
    settings = {"max_tokens": 12, "stop_tokens": set()}
    prompts = [[1, 2, 3], [4, 5]]
    expected = generate_tokens(model, prompts, **settings)
    original = model.hidden

    def hidden(*inputs):
        states = original(*inputs)
        states.sum().item()  # a synchronization, which is not allowed during graph capture
        return states

    torch.manual_seed(0)
    expected_draw = torch.rand(2, 3, device=CUDA)
    torch.manual_seed(0)
    monkeypatch.setattr(model, "hidden", hidden)
    with caplog.at_level("INFO", logger="whet"):
        assert generate_tokens(model, prompts, **settings) == expected
    assert "without CUDA graphs" in caplog.text
    assert torch.equal(
        torch.rand(2, 3, device=CUDA), expected_draw
    )  # the random state is restored, for example for dropout


def test_generation_under_autocast_is_reproducible_and_does_not_affect_training(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cuda")
    prompts = [example.tokens for example in random_examples(4, seed=1)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        first, second = (
            complete(model, prompts, max_tokens=20, stop_tokens=set(), seeds=range(4)) for _ in range(2)
        )
    assert first == second
    model.train()
    model.hidden(torch.arange(5, device=CUDA)[None]).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_resumed_run_equals_an_uninterrupted_run(tiny_directory, tmp_path, compiled):
    class StopAt2(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("test", unfinished=True) if step == 2 else None

    keys = {
        "run": {"device": "cuda", "steps": 5, "compile": compiled},
        "method": {"kind": "lora", "rank": 4, "dropout": 0.1},
    }
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "whole", **keys))
    interrupted = whet.train(run_config(tiny_directory, tmp_path / "part", **keys), [StopAt2()])
    resumed = whet.resume(interrupted.directory)
    a, b = (
        load_file(run.directory / "final" / "adapter_model.safetensors") for run in (uninterrupted, resumed)
    )
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_background_save_stores_the_weights_of_its_step(tmp_path):
    """Copies from the device are asynchronous. The next step must not overtake them."""
    from whet.config.run import Checkpoint
    from whet.training.checkpoint import checkpoint_contents, checkpoint_path
    from whet.training.checkpoint_writer import CheckpointWriter

    model = torch.nn.Linear(4096, 4096, device=CUDA)
    writer = CheckpointWriter(tmp_path, Checkpoint(keep=3))
    for step in (1, 2):
        expected = model.weight.detach().cpu().clone()
        writer.save(step, checkpoint_contents(model, None, step, None), best_steps=())
        writer.wait_for_copy()
        with torch.no_grad():
            model.weight.add_(1.0)
        writer.wait()
        assert torch.equal(
            load_file(checkpoint_path(tmp_path, step) / "weights.safetensors")["weight"], expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_weights_are_equal_on_both_devices(dtype):
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    on_cpu, on_gpu = quantize_nf4(weight), quantize_nf4(weight.to(CUDA))
    for name, tensor in on_cpu.items():
        assert torch.equal(on_gpu[name].cpu(), tensor), name
    expected = dequantize_nf4(on_cpu, (96, 160), dtype)
    assert torch.equal(dequantize_nf4(on_gpu, (96, 160), dtype).cpu(), expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_qlora_run_trains_and_loads(tiny_directory, tmp_path, variant):
    sections = {
        "method": {"kind": "qlora", "rank": 4, "variant": variant},
        "run": {"device": "cuda", "precision": "bf16", "steps": 6},
    }
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    model, _ = whet.load(result.directory, device=CUDA)
    assert math.isfinite(model(torch.arange(8, device=CUDA)[None]).sum().item())
