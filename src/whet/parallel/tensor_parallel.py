"""Tensor parallelism: each rank of a group computes some of the heads and channels of every layer.

The q, k, v, gate and up projections are sharded column-wise, o and down row-wise, so a layer needs two
all-reduces in the forward pass and two in the backward pass. Norms, embeddings and the head are replicated,
so the inputs and outputs of a layer are the same on all ranks.
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

_HEADS_AXIS = 1  # the dimension of heads in queries and keys [B, heads, T, head_dim]


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each layer's matrices over the ranks of a mesh; all ranks must have the same weights."""
    if mesh.size() == 1:
        return
    assert isinstance(model, Decoder)
    for layer, block in zip(model.layers, model.spec.blocks, strict=True):
        parallelize_module(layer, mesh, _plan(block), src_data_rank=None)


def check_tensor_parallel(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError with the reason if a model does not support tensor parallelism over `ranks` ranks."""
    if ranks == 1:
        return
    if (reason := _unsupported_reason(model, ranks)) is not None:
        raise ConfigError(
            f"parallel.tensor={ranks}: {reason}",
            hint="set parallel.tensor=1; parallel.kind=fsdp alone may be enough",
        )


def _unsupported_reason(model: nn.Module, ranks: int) -> str | None:
    if not isinstance(model, Decoder):
        return "tensor parallelism needs a native whet decoder, and this model runs through transformers"
    if any(not p.requires_grad for p in model.parameters()):
        return "tensor parallelism supports method.kind=full only"
    if model.spec.positions == "alibi":
        return "ALiBi positions are not supported, because they differ between heads"
    for block in model.spec.blocks:
        if (reason := _unsupported_block_reason(block, ranks)) is not None:
            return reason
    return None


def _unsupported_block_reason(block: BlockSpec, ranks: int) -> str | None:
    attention, feedforward = block.attention, block.feedforward
    problems: dict[str, bool] = {}
    if isinstance(attention, AttentionSpec):
        problems |= {
            "a fused projection of queries, keys and values is not supported": attention.fused,
            "a norm over the queries of all heads is not supported": attention.qk_norm == "all",
            # the number of query heads is a multiple of it
            f"it does not divide the {attention.kv_heads} key/value heads": attention.kv_heads % ranks != 0,
        }
    elif attention is not None:
        problems["latent attention is not supported"] = True
    if isinstance(feedforward, FeedForwardSpec):
        problems |= {
            "a fused projection of gate and up is not supported": feedforward.fused,
            f"it does not divide the feed-forward width {feedforward.width}": feedforward.width % ranks != 0,
        }
    elif feedforward is not None:
        problems["experts are not supported"] = True
    return next((reason for reason, applies in problems.items() if applies), None)


def _plan(block: BlockSpec) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if isinstance(block.attention, AttentionSpec):
        plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan["self_attn.o_proj"] = RowwiseParallel()
        if block.attention.qk_norm == "head":  # one weight for all heads, so its gradient is a sum over ranks
            plan |= {
                f"self_attn.{name}_norm": SequenceParallel(sequence_dim=_HEADS_AXIS, use_local_output=True)
                for name in "qk"
            }
    if isinstance(block.feedforward, FeedForwardSpec):
        input_projections = ("gate_proj", "up_proj") if block.feedforward.gated else ("up_proj",)
        plan |= {f"mlp.{name}": ColwiseParallel() for name in input_projections}
        plan["mlp.down_proj"] = RowwiseParallel()
    return plan


class ReplicatedGradientSync:
    """Makes the gradients of replicated parameters equal on all ranks of a tensor-parallel group.

    The ranks compute the same gradients, but a GPU may sum in a different order each time. Without this,
    embeddings and norms would slowly diverge between the ranks of a group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.world = world
        self.replicated = [p for p in parameters if isinstance(p, DTensor) and p.device_mesh.ndim == 1]
        self._group: dist.ProcessGroup | None = None
        if world.tp_size > 1 and self.replicated:
            self._group, _ = dist.new_subgroups(world.tp_size)

    def synchronize(self) -> None:
        """Copy the gradients of the group's first rank to the others; call it when gradients are complete."""
        if self._group is None:
            return
        gradients = [cast("DTensor", p.grad).to_local() for p in self.replicated if p.grad is not None]
        vector = torch.cat([gradient.flatten() for gradient in gradients])
        with self.world.watchdog.collective("broadcast of replicated gradients"):
            dist.broadcast(vector, group=self._group, group_src=0)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, received in zip(gradients, vector.split(sizes), strict=True):
            gradient.copy_(received.view_as(gradient))
