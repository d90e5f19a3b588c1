"""What only a CUDA device can show; skipped where there is none."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import whet
from tiny import random_examples, run_config
from whet.adapters.adapter import LoRASettings, adapted, unchanging
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.nf4 import dequantise, quantise
from whet.config.load_config import make_config
from whet.data.batches import BatchStream, make_batch
from whet.data.packing import StepSettings
from whet.generation.cuda_graph import StaticDecodeBatch
from whet.generation.engine import complete, generate_tokens
from whet.generation.sampling import Sampling
from whet.hardware import choose_precision
from whet.models.from_scratch.init_weights import from_scratch
from whet.models.from_scratch.presets import preset_spec
from whet.models.moe import mixtures
from whet.objectives.router_losses import RoutedObjective
from whet.objectives.sft import SFT
from whet.ops.attention import Layout, attend
from whet.ops.grouped_experts import grouped_linear, grouped_problem, loop_linear
from whet.ops.lm_head import Head
from whet.ops.log_softmax import row_losses
from whet.training.callbacks import Callback, StopRun
from whet.training.optim import adamw
from whet.training.router_balancing import RouterMetrics
from whet.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_packed_equals_solo(tiny_directory, dtype, tolerance):
    model, _ = whet.load(tiny_directory, dtype=dtype, device=CUDA)
    examples = random_examples(5, seed=1)
    batch = make_batch([examples[:2], examples[2:]]).to(CUDA)
    with torch.no_grad():
        packed = model.hidden(batch.tokens, batch.positions, batch.layout()).float()
        for row, group in enumerate((examples[:2], examples[2:])):
            start = 0
            for example in group:
                solo = model.hidden(torch.tensor([example.tokens[:-1]], device=CUDA)).float()
                torch.testing.assert_close(
                    packed[row, start : start + example.length], solo[0], rtol=0, atol=tolerance
                )
                start += example.length


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_packed_rows_take_the_kernel_for_documents_in_every_16_bit_run(
    tiny_directory, precision, method, monkeypatch
):
    """With float32 weights that train, rotation makes queries wide: they must not end up in a dense mask."""
    run = trainer(tiny_directory, precision, method, "adamw")
    monkeypatch.setattr(Layout, "document_mask", lambda layout, device: pytest.fail("a dense mask was made"))
    run.step([make_batch([random_examples(5, seed=1)])])


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("narrow", [False, True])
def test_packed_attention_is_that_of_each_document(window, dtype, tolerance, narrow):
    torch.manual_seed(0)
    documents = ((7, 30, 1, 26), (64,))
    q, k, v = (
        torch.randn(2, heads, 64, size, device=CUDA, dtype=dtype, requires_grad=True)
        for heads, size in ((4, 16), (2, 16), (2, 8 if narrow else 16))
    )
    layout = Layout.packed(documents, device=CUDA)
    found = attend(q, k, v, layout, window=window)
    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, (q, k, v), upstream)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    place = torch.arange(64, device=CUDA)
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or 64))
    own = [
        torch.repeat_interleave(torch.arange(len(row), device=CUDA), torch.tensor(row, device=CUDA))
        for row in documents
    ]
    mask = torch.stack([seen & (row[:, None] == row) for row in own])[:, None]
    keys, values = (t.repeat_interleave(2, dim=1) for t in wide[1:])
    scores = (wide[0] @ keys.mT / 4).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    for one, other in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("biased", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, 3.0)])
@pytest.mark.parametrize("columns", [100, 8192, 20_001])
def test_the_kernel_of_the_loss_equals_the_formula(dtype, weighted, biased, scale, softcap, columns):
    torch.manual_seed(0)
    projected = 3 * torch.randn(17, columns, device=CUDA, dtype=dtype)
    targets = torch.randint(0, columns, (17,), device=CUDA)
    row_weight = torch.rand(17, device=CUDA) if weighted else None
    bias = torch.randn(columns, device=CUDA, dtype=dtype) if biased else None
    head = Head(projected, bias, scale, softcap)
    wide = projected.double().requires_grad_()
    logits = head.transform(wide if bias is None else wide + bias.double())
    expected = F.cross_entropy(logits, targets, reduction="none")
    (grad,) = torch.autograd.grad((expected * (1 if row_weight is None else row_weight.double())).sum(), wide)
    losses, found = row_losses(projected, targets, head, row_weight=row_weight)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        found.double(), grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6
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
    config = make_config(run_config(tiny_directory, ".", **keys))
    settings = StepSettings(4, None, 128, pack=True)
    return Trainer(model, SFT(), BatchStream(random_examples(20), settings, seed=0), config, precision=chosen)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_every_precision_learns(tiny_directory, precision, method):
    run = trainer(tiny_directory, precision, method)
    expected = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert all(p.dtype == expected for p in run.trained)
    batch = next(run.stream)
    losses = [run.step(batch)["loss"] for _ in range(25)]
    assert losses[-1] < losses[0] - 0.5


def test_bf16_gradients_point_where_fp32_gradients_point(tiny_directory):
    found = []
    for precision in ("fp32", "bf16"):
        run = trainer(tiny_directory, precision, "full")
        grads = []
        run.optimizer.register_step_pre_hook(
            lambda *_, run=run, grads=grads: grads.extend(p.grad.flatten().float().cpu() for p in run.trained)
        )
        run.step(next(run.stream))
        found.append(torch.cat(grads))
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(240, 64, 192), (240, 576, 1536), (4096, 2048, 2048)])
def test_a_small_update_of_an_adapter_is_not_lost_in_16_bits(rows, width, out, bias, settled):
    """All of it arrives in the mean, and the output is not much rougher than one rounding makes it."""
    torch.manual_seed(0)
    base = torch.nn.Linear(width, out, bias=bias, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
    layer = LoRALinear(base, LoRASettings(8, 16.0))
    layer.lora_B.data = 3e-4 * torch.randn_like(layer.lora_B)
    x = torch.randn(rows, width, device=CUDA).bfloat16()
    exact = F.linear(x.double(), *(p.double() for p in base.parameters()))
    change = x.double() @ layer.delta().double().T
    with torch.no_grad(), unchanging(layer) if settled else contextlib.nullcontext():
        found = layer(x).double()
    share = ((found - exact) * change).sum() / change.square().sum()
    once = (exact.bfloat16() - exact).square().mean().sqrt()
    assert abs(share.item() - 1) < 0.02 + 4 * (once / change.square().sum().sqrt()).item()
    assert (found - exact - change).square().mean().sqrt() < 1.8 * once


OPTIMIZERS = ["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_nonfinite_step_is_masked_on_the_device(tiny_directory, optimizer):
    run = trainer(tiny_directory, "bf16", "full", optimizer)
    run.step(next(run.stream))
    before = [p.detach().clone() for p in run.trained]
    original = run.objective.loss
    run.objective.loss = lambda model, batch: type(r := original(model, batch))(
        {"loss": r.sums["loss"] * math.nan}
    )
    with pytest.raises(whet.WhetError, match="weights were left as they were"):
        run.step(next(run.stream))
    assert all(torch.equal(a, b) for a, b in zip(before, run.trained, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_in_a_step_waits_for_the_device_before_its_numbers_are_read(
    tiny_directory, monkeypatch, optimizer
):
    step_without_waiting(trainer(tiny_directory, "bf16", "full", optimizer), monkeypatch)


def step_without_waiting(run, monkeypatch):
    """A step in which waiting for the device is an error, up to the one read of its numbers."""
    monkeypatch.setattr(adamw, "_LARGE", 1000)  # whet's own kernel, and torch's for the smallest tensors
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
    whet.save(from_scratch(preset_spec("nano-moe", layers=2, vocab_size=260), seed=0), None, directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_experts_are_the_loops(dtype):
    if (problem := grouped_problem("cuda", dtype, (64, 32))) is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    x = torch.randn(100, 32, device=CUDA, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, 64, 32, device=CUDA, dtype=dtype, requires_grad=True)
    ends = torch.tensor([13, 13, 50, 99, 100], device=CUDA, dtype=torch.int32)  # groups of no special size
    upstream = torch.randn(100, 64, device=CUDA, dtype=dtype)
    found, expected = grouped_linear(x, weight, ends), loop_linear(x, weight, ends)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    )
    for a, b in pairs:
        assert (a.float() - b.float()).norm() <= (
            1e-2 if dtype == torch.bfloat16 else 1e-5
        ) * b.float().norm()


def test_routers_are_reported_without_waiting_for_the_device(experts_directory, monkeypatch):
    if (problem := grouped_problem("cuda", torch.bfloat16, (128, 176))) is not None:
        pytest.skip(problem)
    run = trainer(experts_directory, "bf16", "full")
    run.objective = RoutedObjective(SFT(), mixtures(run.model), load_balancing=0.01, z_loss=0.01)
    step_without_waiting(run, monkeypatch)
    metrics = run.step(next(run.stream))
    RouterMetrics(mixtures(run.model), [0, 1]).on_step_end(1, metrics)
    assert sum(metrics["per_expert_share"]) == pytest.approx(1, abs=1e-4)


def test_generation_gives_the_tokens_of_the_cpu(tiny_directory):
    prompts = [example.tokens for example in random_examples(5, seed=1)]
    found = [
        generate_tokens(
            whet.load(tiny_directory, dtype=torch.float32, device=device)[0],
            prompts,
            max_tokens=20,
            stop_tokens=set(),
        )
        for device in ("cpu", "cuda")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("adapter", [None, "lora", "dora"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_steps_give_the_tokens_of_the_cpu(tiny_directory, monkeypatch, temperature, adapter):
    """Rows that end early, penalties and adapters included; only the first step of a shape is run as it is."""
    ran = []
    original = StaticDecodeBatch.step
    monkeypatch.setattr(
        StaticDecodeBatch, "step", lambda self: (ran.append(len(self._token)), original(self))
    )
    prompts = [example.tokens for example in random_examples(8, seed=1)]
    found = []
    for device in ("cpu", "cuda"):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device=device)
        if adapter:
            whet.attach_lora(model, rank=4, variant=adapter)
            generator = torch.Generator().manual_seed(1)
            for _, layer in adapted(model):
                for weight in (layer.lora_A, layer.lora_B):  # devices draw other numbers from one seed
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        sampling = Sampling(temperature, top_k=100, top_p=0.95, repetition_penalty=1.1)
        found.append(
            complete(
                model,
                prompts,
                max_tokens=60,
                stop_tokens=range(0, 260, 20),
                sampling=sampling,
                seeds=range(8),
            )
        )
    assert [row.tokens for row in found[0]] == [row.tokens for row in found[1]]
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(
            torch.tensor(here.logprobs), torch.tensor(there.logprobs), rtol=0, atol=1e-3
        )
    assert len(ran) == 2 * len(set(ran)), "for each number of rows, one step to warm up and one to record"


def test_what_cannot_be_recorded_is_decoded_step_by_step(tiny_directory, monkeypatch, caplog):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cuda")
    settings = {"max_tokens": 12, "stop_tokens": set()}
    prompts = [[1, 2, 3], [4, 5]]
    expected = generate_tokens(model, prompts, **settings)
    original = model.hidden

    def hidden(*inputs):
        found = original(*inputs)
        found.sum().item()  # the host waits: not allowed while a graph is recorded
        return found

    torch.manual_seed(0)
    drawn = torch.rand(2, 3, device=CUDA)
    torch.manual_seed(0)
    monkeypatch.setattr(model, "hidden", hidden)
    with caplog.at_level("INFO", logger="whet"):
        assert generate_tokens(model, prompts, **settings) == expected
    assert "without CUDA graphs" in caplog.text
    assert torch.equal(torch.rand(2, 3, device=CUDA), drawn)  # dropout, say, goes on as if nothing had been


def test_generation_under_autocast_equals_itself_and_leaves_training_alone(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cuda")
    prompts = [example.tokens for example in random_examples(4, seed=1)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        first, again = (
            complete(model, prompts, max_tokens=20, stop_tokens=set(), seeds=range(4)) for _ in range(2)
        )
    assert first == again
    model.train()
    model.hidden(torch.arange(5, device=CUDA)[None]).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_directory, tmp_path, compiled):
    class StopAt2(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("test", unfinished=True) if step == 2 else None

    keys = {
        "run": {"device": "cuda", "steps": 5, "compile": compiled},
        "method": {"kind": "lora", "rank": 4, "dropout": 0.1},
    }
    whole = whet.train(run_config(tiny_directory, tmp_path / "whole", **keys))
    part = whet.train(run_config(tiny_directory, tmp_path / "part", **keys), [StopAt2()])
    done = whet.resume(part.directory)
    a, b = (load_file(run.directory / "final" / "adapter_model.safetensors") for run in (whole, done))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path):
    """Copies off the device are queued: the next step must not overtake them."""
    from whet.config.run import Checkpoint
    from whet.training.checkpoint import checkpoint_path, contents_of
    from whet.training.checkpoint_writer import CheckpointWriter

    model = torch.nn.Linear(4096, 4096, device=CUDA)
    saver = CheckpointWriter(tmp_path, Checkpoint(keep=3))
    for step in (1, 2):
        expected = model.weight.detach().cpu().clone()
        saver.save(step, contents_of(model, None, step, None), best_steps=())
        saver.before_update()
        with torch.no_grad():
            model.weight.add_(1.0)
        saver.wait()
        assert torch.equal(
            load_file(checkpoint_path(tmp_path, step) / "weights.safetensors")["weight"], expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_weights_are_the_same_on_both_devices(dtype):
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    here, there = quantise(weight), quantise(weight.to(CUDA))
    for name, tensor in here.items():
        assert torch.equal(there[name].cpu(), tensor), name
    expected = dequantise(here, (96, 160), dtype)
    assert torch.equal(dequantise(there, (96, 160), dtype).cpu(), expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_qlora_run_learns_and_loads(tiny_directory, tmp_path, variant):
    sections = {
        "method": {"kind": "qlora", "rank": 4, "variant": variant},
        "run": {"device": "cuda", "precision": "bf16", "steps": 6},
    }
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    model, _ = whet.load(result.directory, device=CUDA)
    assert math.isfinite(model(torch.arange(8, device=CUDA)[None]).sum().item())
