"""Checks before distributed training: equal configs, available devices, equal weights on all ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.config.load_config import flatten_keys, to_dict
from whet.config.quality import Quality
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, RunError
from whet.parallel.process_group import World

# the other optimizers need full matrices, or have kernels that do not support sharded tensors
SHARDED_OPTIMIZERS = ("adamw", "adam", "sgd", "lion")


def apply_parallel_config(world: World, config: RunConfig) -> World:
    """Check that all ranks have the same config, and return the world with its parallel settings."""
    check_equal_on_ranks(world, "config", to_dict(config))
    config.parallel.check_processes(world.size)
    world.watchdog.timeout_s = config.parallel.timeout
    if world.size > 1 and config.parallel.kind == "fsdp":
        check_sharding(config)
    return replace(world, tp_size=config.parallel.tensor)


def check_sharding(config: RunConfig) -> None:
    """Raise ConfigError for a config that FSDP does not support."""
    if isinstance(config.model, Quality):
        raise ConfigError(
            "parallel.kind fsdp shards the layers of a language model, and model.quality has no such layers",
            hint="set parallel.kind=ddp",
        )
    if config.log.probes is not None:
        raise ConfigError(
            "log.probes need full weights, and with parallel.kind fsdp each rank has a shard",
            hint="remove log.probes, or set parallel.kind=ddp",
        )
    if (name := config.optim.name) not in SHARDED_OPTIMIZERS:
        raise ConfigError(
            f"optim.name {name} needs full matrices, and with parallel.kind fsdp each rank has a shard",
            hint=f"choose one of {', '.join(SHARDED_OPTIMIZERS)}, or set parallel.kind=ddp",
        )


def check_device(world: World, device: torch.device) -> None:
    """Raise ConfigError unless every process of this machine can have its own GPU, or uses the CPU."""
    if world.size == 1 or device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"{world.size} processes cannot share the device {device}", hint="set run.device=cpu"
        )
    if ":" in str(device):
        raise ConfigError(
            f"run.device={device}: each of the {world.size} processes needs its own device",
            hint="set run.device to cuda",
        )
    if world.local_rank >= (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"process {world.local_rank + 1} on this machine has no GPU: torch finds {devices}",
            hint="start at most one process per GPU",
        )


def check_equal_on_ranks(world: World, name: str, values: Mapping[str, Any]) -> None:  # Any: JSON values
    """Raise ConfigError on all ranks if the values of any rank differ from those of rank 0.

    Args:
        world: the processes of the run.
        name: what the values are, for the error.
        values: the values of this rank.
    """
    all_values = world.gather(dict(flatten_keys(values)))
    reference = all_values[0]
    for rank, rank_values in enumerate(all_values):
        different = [
            key for key in {**reference, **rank_values} if reference.get(key) != rank_values.get(key)
        ]
        if different:
            shown = "; ".join(
                f"{key}: {reference.get(key)} and {rank_values.get(key)}" for key in different[:4]
            )
            raise ConfigError(
                f"rank 0 and rank {rank} do not have the same {name}: {shown}",
                hint="use the same files and the same command on every machine",
            )


@torch.no_grad()
def broadcast_parameters(world: World, parameters: Iterable[nn.Parameter]) -> None:
    """Copy the trained weights of rank 0 to all ranks, because random init and rounding may differ."""
    if world.size == 1:
        return
    for parameter in parameters:
        if parameter.is_meta:
            raise RunError("a trained parameter is still on the meta device: it has no values to broadcast")
        dist.broadcast(parameter.detach(), src=0)


def seed_rank(world: World, seed: int) -> None:
    """Seed torch differently on each data-parallel rank, so that dropout masks differ."""
    if world.size > 1:
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * world.dp_rank) % 2**63)
