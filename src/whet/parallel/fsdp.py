"""FSDP2: every rank stores a shard of each weight, and gathers a layer only while it computes it."""

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
SHARDS_INTEGERS = torch.__version__ >= "2.13"  # with older versions every rank stores all 4-bit weights


def device_mesh(world: World, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks: data-parallel by tensor-parallel ranks."""
    return init_device_mesh(device.type, (world.dp_size, world.tp_size), mesh_dim_names=(DATA, TENSOR))


def shard_model(model: LanguageModel, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard a model's weights with FSDP2, layer by layer; gradients become sums over ranks, not means.

    Layers are gathered in the compute dtype, and gradients are summed in float32. 4-bit weights are sharded
    if torch supports it. The embedding, the last norm and the head stay gathered from a forward pass to the
    end of its backward pass, because losses read the head after the forward pass.
    """
    is_mixed = precision.compute != precision.trained
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if is_mixed else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    _convert_nf4_buffers(model)
    for block in model.blocks():
        fully_shard(block, mesh=mesh[DATA], mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh[DATA], mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "hidden")


def _convert_nf4_buffers(model: nn.Module) -> None:
    """Convert the buffers of 4-bit layers to frozen parameters, because FSDP shards parameters only."""
    if not SHARDS_INTEGERS:
        return
    for layer in model.modules():
        if isinstance(layer, NF4Linear):
            for name in ("codes", "scales", "rest"):
                tensor = getattr(layer, name)
                delattr(layer, name)
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers as a unit."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gathered_parameters(*models: nn.Module) -> Iterator[None]:
    """Gather all weights of the models on every rank within the `with` block.

    Each rank may then run forward passes independently. The gathered weights need memory for the complete
    models in the compute dtype.
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
def full_parameters_on_main(model: nn.Module, world: World) -> Iterator[None]:
    """Replace the sharded weights on rank 0 with the full ones, on the CPU, within the `with` block.

    It is for saving the model. All ranks must enter it, because gathering is a collective.
    """
    sharded = [
        (module, name, cast("Any", parameter))  # Any: a parameter that is a DTensor
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if sharded and buffer is not None
    ]
    full_parameters: dict[int, nn.Parameter | None] = {}  # by id, so that tied parameters stay tied
    for _, _, parameter in sharded:
        if id(parameter) not in full_parameters:
            full = parameter.full_tensor().detach()
            full_parameters[id(parameter)] = (
                nn.Parameter(full.cpu(), requires_grad=parameter.requires_grad) if world.is_main else None
            )
    try:
        if world.is_main:
            for module, name, parameter in sharded:
                module._parameters[name] = full_parameters[id(parameter)]
            for module, name, buffer in buffers:
                module._buffers[name] = buffer.cpu()
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for module, name, parameter in sharded:
            module._parameters[name] = parameter


def local_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes that this rank stores of the tensors."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
