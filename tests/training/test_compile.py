"""Compiled layers are single graphs, and nothing is recompiled after the first steps."""

import copy
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

import whet
from models.test_decoder import MODELS
from models.test_decoder import model as make_model
from tiny import run_config
from tiny_adapters import shake
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.hardware import choose_precision
from whet.objectives.sft import SFT
from whet.runs.assemble import open_assembly
from whet.training import compile as compiling
from whet.training.callbacks import Callback
from whet.training.compile import compile_blocks
from whet.training.loss import autocast_context

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Graphs(Callback):
    def __init__(self):
        self.compiled = []
        self.tokens = []

    def on_eval_end(self, step, metrics):
        if step == 0:
            self.before = counters["stats"]["unique_graphs"]

    def on_step_end(self, step, metrics):
        self.compiled.append(counters["stats"]["unique_graphs"])
        self.tokens.append(metrics["tokens"])


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["all-grouped", "all-head-norm", "all-latent", "alibi", "norms-sandwich"])
def test_layer_compiles_to_one_graph(name, adapted):
    torch._dynamo.reset()
    blocks, settings = MODELS[name]
    decoder = make_model(blocks[:1], **settings)
    if adapted:
        whet.attach_lora(decoder, rank=2)
    for layer in decoder.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=True)  # fullgraph: a break is an error
    decoder.hidden(torch.arange(8)[None]).float().sum().backward()


@pytest.mark.parametrize("trained", [[0, 1, 2], [1, 2], []], ids=str)
def test_layers_with_adapters_share_one_graph_and_need_no_gradient_below(monkeypatch, trained):
    blocks, settings = MODELS["all-grouped"]
    plain = shake(whet.attach_lora(make_model((blocks * 3)[:3], **settings), rank=2))
    for layer in {0, 1, 2} - {*trained}:
        plain.layers[layer].requires_grad_(False)
    plain.norm.weight.requires_grad_()  # so that there is a backward pass in any case
    decoder = copy.deepcopy(plain)
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="eager")
    )
    counters.clear()
    torch._dynamo.reset()
    batch = make_batch([[Example(list(range(9)), [True] * 9, "")]])
    assert compile_blocks(decoder, batch, choose_precision("fp32", decoder.device)).startswith("on")
    assert counters["stats"]["unique_graphs"] == {3: 1, 2: 3, 0: 1}[len(trained)]
    for model in (plain, decoder):
        model.hidden(batch.tokens).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    actual = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=1e-3)
    assert {int(name.split(".")[1]) for name in actual if name.startswith("layers")} == {*trained}


@pytest.mark.parametrize("pack", [True, False])
def test_compilation_on_the_first_batch_does_not_change_the_run(tiny_directory, tmp_path, monkeypatch, pack):
    tried = []
    monkeypatch.setattr(
        compiling, "compile_blocks", lambda model, batch, precision: tried.append(batch) or "on"
    )
    config = run_config(tiny_directory, tmp_path, data={"pack": pack}, run={"steps": 1, "compile": True})
    with open_assembly(validate_config(config)) as actual:
        first = next(actual.stream)[0]
    [batch] = tried
    assert torch.equal(batch.tokens, first.tokens)
    assert batch.documents == first.documents


def test_compiler_failure_restores_the_layers(tiny):
    model, _ = tiny
    model.layers[0].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler here"))
    )
    batch = make_batch([[Example(list(range(9)), [True] * 9, "")]])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    said = compile_blocks(model, batch, choose_precision("fp32", model.device))
    assert said == "off: no compiler here"
    assert all(layer._compiled_call_impl is None for layer in model.layers)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4}, {"kind": "full"}], ids=["lora", "full"])
def test_other_shapes_do_not_recompile(tiny_directory, tmp_path, device, method):
    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs()
    config = run_config(
        tiny_directory,
        tmp_path,
        method=method,
        run={"steps": 10, "compile": True, "device": device, "batch_size": 3},
        eval={"every": 5},
    )
    whet.train(config, [graphs])
    rows = [after - before for before, after in zip(graphs.tokens, graphs.tokens[1:], strict=False)]
    assert len({graphs.tokens[0], *rows}) > 5  # shapes differ
    assert graphs.before > 0
    assert graphs.compiled[0] == graphs.before  # the layers were tried on the first step's batch
    assert graphs.compiled[2:] == [graphs.compiled[2]] * 8


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_compiled_gradients_are_as_accurate_as_eager_ones(tiny, device, adapted):
    """Compare bf16 compute on fp32 weights, compiled and eager, with float64."""
    torch._dynamo.reset()
    model, _ = tiny
    if adapted:
        shake(whet.attach_lora(model, rank=4))
    else:
        model.requires_grad_()
    torch.manual_seed(0)
    batch = make_batch([[Example(torch.randint(0, 200, (33,)).tolist(), [True] * 33, "")] for _ in range(4)])

    def gradients(dtype, precision, compiled):
        copied = copy.deepcopy(model).to(device, dtype).train()
        given, chosen = batch.to(copied.device), choose_precision(precision, copied.device)
        if compiled:
            assert compile_blocks(copied, batch, chosen).startswith("on")
        with autocast_context(chosen, copied.device):
            SFT().loss(copied, given).sums["loss"].backward()
        actual = [p.grad.double().flatten().cpu() for p in copied.parameters() if p.grad is not None]
        return torch.cat(actual)

    exact = gradients(torch.float64, "fp32", compiled=False)
    plain, compiled = (
        (gradients(torch.float32, "bf16", compiled=each) - exact).norm() / exact.norm()
        for each in (False, True)
    )
    assert plain < 0.04
    assert compiled < 1.25 * plain


COMPILE_ONCE = """
import json, sys
import whet
from torch._dynamo.utils import counters
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.hardware import choose_precision
from whet.training.compile import compile_blocks

model, _ = whet.load(sys.argv[1])
whet.attach_lora(model, rank=2)
batch = make_batch([[Example(list(range(9)), [True] * 9, "")]])
print(compile_blocks(model, batch, choose_precision("fp32", model.device)))
print(json.dumps(counters["aot_autograd"]))
"""


@pytest.mark.slow
def test_second_process_uses_the_compile_cache(tiny_directory, tmp_path):
    def actual():
        done = subprocess.run(
            [sys.executable, "-c", COMPILE_ONCE, str(tiny_directory)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        )
        state, counts = done.stdout.splitlines()[-2:]
        assert state.startswith("on")
        return json.loads(counts)

    assert actual()["autograd_cache_miss"] > 0
    again = actual()
    assert again["autograd_cache_hit"] == again["total"] == 1  # all layers share a graph
