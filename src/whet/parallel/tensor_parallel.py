"""Tensor parallelism: neighbouring ranks compute each layer together, each some of its heads and channels.

Queries, keys, values, gate and up are cut by their outputs, the projections back by their inputs, so that a
layer needs two sums over the ranks forward and two backward. Norms, embeddings and the head are whole on
each rank: what goes into a layer and what comes out of it is the same on all of them.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.spec import AttentionSpec, BlockSpec, FeedForwardSpec
from whet.parallel.process_group import World

_HEADS = 1  # the dimension of heads in queries and keys [B, heads, T, head_dim]


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep of each layer's matrices what this rank of a mesh computes with; all ranks hold the same model."""
    if mesh.size() == 1:
        return
    assert isinstance(model, Decoder)
    for layer, block in zip(model.layers, model.spec.blocks, strict=True):
        parallelize_module(layer, mesh, _plan(block), src_data_rank=None)


def refuse_uncuttable(model: nn.Module, ranks: int) -> None:
    """Raise a ConfigError that says why a model cannot be computed by so many ranks together."""
    if ranks == 1:
        return
    if (reason := _obstacle(model, ranks)) is not None:
        raise ConfigError(
            f"parallel.tensor={ranks}: {reason}",
            hint="set parallel.tensor=1; parallel.kind=fsdp alone may do",
        )


def _obstacle(model: nn.Module, ranks: int) -> str | None:
    if not isinstance(model, Decoder):
        return "only whet's own decoders can be cut, and this model comes through transformers"
    if any(not p.requires_grad for p in model.parameters()):
        return "only method.kind=full trains layers that are cut"
    if model.spec.positions == "alibi":
        return "ALiBi positions differ from head to head, and are not cut"
    for block in model.spec.blocks:
        if (reason := _obstacle_in_block(block, ranks)) is not None:
            return reason
    return None


def _obstacle_in_block(block: BlockSpec, ranks: int) -> str | None:
    attention, feedforward = block.attention, block.feedforward
    odd: dict[str, bool] = {}
    if isinstance(attention, AttentionSpec):
        odd |= {
            "one projection for queries, keys and values is not cut": attention.fused,
            "a norm over the queries of all heads is not cut": attention.qk_norm == "all",
            # which divide the heads
            f"it does not divide the {attention.kv_heads} key/value heads": attention.kv_heads % ranks != 0,
        }
    elif attention is not None:
        odd["latent attention is not cut"] = True
    if isinstance(feedforward, FeedForwardSpec):
        odd |= {
            "one projection for gate and up is not cut": feedforward.fused,
            f"it does not divide a feed-forward width of {feedforward.width}": feedforward.width % ranks != 0,
        }
    elif feedforward is not None:
        odd["experts are not cut"] = True
    return next((reason for reason, holds in odd.items() if holds), None)


def _plan(block: BlockSpec) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if isinstance(block.attention, AttentionSpec):
        plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan["self_attn.o_proj"] = RowwiseParallel()
        if block.attention.qk_norm == "head":  # one weight for all heads: its gradient is a sum over ranks
            plan |= {
                f"self_attn.{name}_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
                for name in "qk"
            }
    if isinstance(block.feedforward, FeedForwardSpec):
        into = ("gate_proj", "up_proj") if block.feedforward.gated else ("up_proj",)
        plan |= {f"mlp.{name}": ColwiseParallel() for name in into}
        plan["mlp.down_proj"] = RowwiseParallel()
    return plan


class NeighbourGradients:
    """Gradients of what neighbours hold twice: all of them take those of the first.

    They compute the same, and yet a GPU may add up in another order each time: without this, embeddings and
    norms would slowly differ between ranks that compute layers together.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.world = world
        self.twice = [p for p in parameters if isinstance(p, DTensor) and p.device_mesh.ndim == 1]
        self._group: dist.ProcessGroup | None = None
        if world.tensor > 1 and self.twice:
            self._group, _ = dist.new_subgroups(world.tensor)

    def align(self) -> None:
        """After the gradients of a step are complete."""
        if self._group is None:
            return
        parts = [cast("DTensor", p.grad).to_local() for p in self.twice if p.grad is not None]
        vector = torch.cat([part.flatten() for part in parts])
        with self.world.watch.collective("the gradients of neighbours"):
            dist.broadcast(vector, group=self._group, group_src=0)
        for part, same in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(same.view_as(part))
