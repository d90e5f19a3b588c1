"""FSDP2: every rank holds a part of each weight, and has a layer whole only while it computes it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from whet.adapters.nf4 import NF4Linear
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.parallel.process_group import World

DATA, TENSOR = "data", "tensor"
CUTS_INTEGERS = torch.__version__ >= "2.13"  # before, each rank has 4-bit weights whole


def device_mesh(world: World, device: torch.device) -> DeviceMesh:
    """The ranks as shares of the data by ranks that compute layers together."""
    return init_device_mesh(device.type, (world.shares, world.tensor), mesh_dim_names=(DATA, TENSOR))


def shard(model: LanguageModel, mesh: DeviceMesh, precision: Precision) -> None:
    """Cut a model's weights into parts, layer by layer; gradients become sums over ranks, not means.

    Layers are gathered in the dtype that is computed in, and gradients added up in float32. Weights in 4 bits
    are cut as well where torch can. What surrounds the layers (embedding, last norm, head) stays gathered
    from a forward pass to the end of its backward pass: losses read the head after the forward pass.
    """
    mixed = precision.compute != precision.trained
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if mixed else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    _buffers_to_weights(model)
    for block in model.blocks():
        fully_shard(block, mesh=mesh[DATA], mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh[DATA], mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "hidden")


def _buffers_to_weights(model: nn.Module) -> None:
    """FSDP cuts parameters only: 4-bit codes become some, which never train, where it takes integers."""
    if not CUTS_INTEGERS:
        return
    for layer in model.modules():
        if isinstance(layer, NF4Linear):
            for name in ("codes", "scales", "rest"):
                tensor = getattr(layer, name)
                delattr(layer, name)
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that gather their weights on their own."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gathered(*models: nn.Module) -> Iterator[None]:
    """Have models whole on every rank for a while, so that each may run them as often as it likes.

    Takes the memory of the whole models, in the dtype they are computed in.
    """
    modules = [module for model in models for module in sharded_modules(model)]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(cast("Any", module) not in models, recurse=False)  # Any: both
            module.reshard()


@contextlib.contextmanager
def whole_on_main(model: nn.Module, world: World) -> Iterator[None]:
    """Let rank 0 have a model with whole weights, on the host, to save it; the others help and wait."""
    owners = [
        (module, name, cast("Any", parameter))  # Any: a parameter that is a DTensor
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if owners and buffer is not None
    ]
    found: dict[int, nn.Parameter | None] = {}  # tied ones stay tied
    for _, _, parameter in owners:
        if id(parameter) not in found:
            full = parameter.full_tensor().detach()
            kept = nn.Parameter(full.cpu(), requires_grad=parameter.requires_grad) if world.is_main else None
            found[id(parameter)] = kept
    try:
        if world.is_main:
            for module, name, parameter in owners:
                module._parameters[name] = found[id(parameter)]
            for module, name, buffer in buffers:
                module._buffers[name] = buffer.cpu()
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for module, name, parameter in owners:
            module._parameters[name] = parameter


def local_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that this rank holds of some tensors."""
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in parts)
