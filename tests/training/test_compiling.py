"""Compiled layers are whole graphs, and after the first steps nothing is compiled again."""

import pytest
import torch
from torch._dynamo.utils import counters

import whet
from models.test_pieces import MODELS
from models.test_pieces import model as make_model
from tiny import run_config
from whet.training.callbacks import Callback

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Graphs(Callback):
    def __init__(self):
        self.compiled = []
        self.tokens = []

    def on_step_end(self, step, metrics):
        self.compiled.append(counters["stats"]["unique_graphs"])
        self.tokens.append(metrics["tokens"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "name", ["all-grouped", "all-head-norm", "all-window", "latent-hybrid", "alibi", "mixed"]
)
def test_a_layer_is_one_graph(name, adapted, dtype):
    torch._dynamo.reset()
    blocks, settings = MODELS[name]
    decoder = make_model(blocks, **settings).to(dtype)
    if adapted:
        whet.attach_lora(decoder, rank=2)
    for layer in decoder.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=True)  # fullgraph: a break is an error
    decoder.hidden(torch.arange(8)[None]).float().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4}, {"kind": "full"}], ids=["lora", "full"])
def test_steps_of_other_shapes_compile_nothing_new(tiny_directory, tmp_path, device, method):
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
    assert graphs.compiled[0] > 0
    assert graphs.compiled[2:] == [graphs.compiled[2]] * 8
