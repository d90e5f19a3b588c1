"""Tensor-parallel layers: the same run as on one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import whet
from distributed.ranks import run_ranks
from tiny import write_tiny_model
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.spec import AttentionSpec, BlockSpec, FeedForwardSpec, ModelSpec, NormSpec, RopeSpec
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.lm_head import Head
from whet.parallel.process_group import World
from whet.parallel.tensor_parallel import ReplicatedGradientSync, apply_tensor_parallel, check_tensor_parallel

KINDS = {
    "llama": {},
    "biases": {"attention": {"bias": True, "out_bias": True}, "feedforward": {"bias": True, "gated": False}},
    "norms of heads": {"attention": {"qk_norm": "head"}, "tied_head": True},
    "sandwich": {"placement": "sandwich", "attention": {"softcap": 20.0, "window": 5}},
}


def tiny_spec(attention=None, feedforward=None, placement="pre", tied_head=False, **more):
    block = BlockSpec(
        AttentionSpec(4, 2, 8, **{"rope": RopeSpec(), **(attention or {})}),
        FeedForwardSpec(48, **(feedforward or {})),
        placement,
    )
    return ModelSpec("whet", 64, 32, (block, block), NormSpec(), tied_head, 128, **more)


def new_decoder(kind):
    torch.manual_seed(0)
    model = Decoder(tiny_spec(**KINDS[kind])).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def loss_of(model, tokens):
    hidden = model.hidden(tokens)
    weight = model.head().weight
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    targets = tokens.roll(-1, 1).flatten()
    return linear_cross_entropy(hidden.flatten(0, 1), Head(full), targets) / tokens.numel()


def steps(model, batches):
    """Return losses and weights after plain gradient descent, which exposes any wrong gradient."""
    losses = []
    for tokens in batches:
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.5)
                p.grad = None
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return losses, {name: p.detach().numpy() for name, p in full.items()}


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (4, 16), generator=generator) for _ in range(count)]


def train_on_ranks(rank, kind, data, tensor):
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    model = new_decoder(kind)
    apply_tensor_parallel(model, mesh["tensor"])
    if data > 1:
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh["data"])
    size = 4 // data
    share = [tokens[size * (rank // tensor) :][:size] for tokens in batches()]
    for layer in model.layers:
        assert layer.self_attn.q_proj.weight.to_local().numel() == 32 * 32 // (data * tensor)
    model.train()
    if data > 1:
        register_fsdp_forward_method(model, "hidden")
    return steps(model, share)


@pytest.mark.parametrize(
    ("kind", "data", "tensor"),
    [
        ("norms of heads", 1, 2),
        *(pytest.param(kind, 1, 2, marks=pytest.mark.slow) for kind in KINDS if kind != "norms of heads"),
        *(pytest.param(kind, 2, 2, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_sharded_layers_train_like_full_ones(kind, data, tensor):
    losses, weights = steps(new_decoder(kind), batches())
    for rank, (rank_losses, on_rank) in enumerate(
        run_ranks(train_on_ranks, data * tensor, kind, data, tensor)
    ):
        assert on_rank.keys() == weights.keys()
        error = sum(((on_rank[name] - weights[name]) ** 2).sum() for name in weights) ** 0.5
        size = sum((weights[name] ** 2).sum() for name in weights) ** 0.5
        assert error / size < 1e-12, (rank, error / size)
        if data == 1:
            assert rank_losses == pytest.approx(losses, rel=1e-12)


def align_gradients(rank):
    """What neighbours hold replicated has another gradient on each of them; a weight that is cut keeps its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    replicated = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh["data"], [Shard(0)]))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]))
    for p in (replicated, sharded):
        p.grad = torch.zeros_like(p)
        p.grad.to_local().fill_(rank)
    ReplicatedGradientSync([replicated, sharded], World(rank, 4, tp_size=2)).synchronize()
    return replicated.grad.to_local().tolist(), sharded.grad.to_local().tolist()


def test_replicated_gradients_are_equal_within_a_group():
    gradients = run_ranks(align_gradients, 4)
    assert [replicated for replicated, _ in gradients] == [[0, 0], [0, 0], [2, 2], [2, 2]]
    assert [sharded for _, sharded in gradients] == [[0], [1], [2], [3]]


def generate_on_ranks(rank, directory):
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)))
    return whet.generate(model, tokenizer, "What is it?", max_tokens=12)


def test_sharded_layers_generate_the_same_text(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    model, tokenizer = whet.load(tmp_path / "tiny", dtype=torch.float32, device="cpu")
    expected = whet.generate(model, tokenizer, "What is it?", max_tokens=12)
    assert run_ranks(generate_on_ranks, 2, tmp_path / "tiny") == [expected] * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 4, "does not divide the 2 key/value heads"),
        (
            {"attention": {"fused": True}},
            2,
            "a fused projection of queries, keys and values is not supported",
        ),
        ({"attention": {"qk_norm": "all"}}, 2, "a norm over the queries of all heads is not supported"),
        ({"feedforward": {"fused": True}}, 2, "a fused projection of gate and up is not supported"),
        ({"positions": "alibi", "attention": {"rope": None}}, 2, "ALiBi"),
    ],
)
def test_unsupported_models_are_rejected(changes, ranks, reason):
    with pytest.raises(ConfigError, match=f"parallel.tensor={ranks}: .*{reason}"):
        check_tensor_parallel(Decoder(tiny_spec(**changes)), ranks)


def test_adapters_are_rejected(tiny):
    model, _ = tiny
    whet.attach_lora(model, rank=2)
    with pytest.raises(ConfigError, match=r"supports method\.kind=full only"):
        check_tensor_parallel(model, 2)


def test_one_rank_supports_every_model():
    check_tensor_parallel(Decoder(tiny_spec(attention={"fused": True})), 1)
