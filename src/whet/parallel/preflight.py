"""What must hold before ranks train together: a config they share, devices, models that are alike."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.config.load_config import flat_keys, to_dict
from whet.config.quality import Quality
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, RunError
from whet.parallel.process_group import World

# the others read a whole matrix, or use kernels that know nothing of parts
SHARDED_OPTIMIZERS = ("adamw", "adam", "sgd", "lion")


def agreed(world: World, config: RunConfig) -> World:
    """The world as a config wants it, once all ranks are known to have the same config."""
    refuse_differences(world, "config", to_dict(config))
    config.parallel.check_processes(world.size)
    world.watch.limit_s = config.parallel.timeout
    if world.size > 1 and config.parallel.kind == "fsdp":
        check_sharding(config)
    return replace(world, tensor=config.parallel.tensor)


def check_sharding(config: RunConfig) -> None:
    """Refuse what cannot be cut into parts."""
    if isinstance(config.model, Quality):
        raise ConfigError(
            "parallel.kind fsdp cuts the layers of a language model, and model.quality has none",
            hint="set parallel.kind=ddp",
        )
    if config.log.probes is not None:
        raise ConfigError(
            "log.probes look at whole weights, and with parallel.kind fsdp each rank has a part",
            hint="leave out log.probes, or set parallel.kind=ddp",
        )
    if (name := config.optim.name) not in SHARDED_OPTIMIZERS:
        raise ConfigError(
            f"optim.name {name} reads whole matrices, and with parallel.kind fsdp each rank has a part",
            hint=f"choose one of {', '.join(SHARDED_OPTIMIZERS)}, or parallel.kind=ddp",
        )


def check_device(world: World, device: torch.device) -> None:
    """Every process of a machine has a GPU of its own."""
    if world.size == 1 or device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(f"{world.size} processes cannot share the device {device}", hint="run.device=cpu")
    if ":" in str(device):
        raise ConfigError(
            f"run.device={device}: each of {world.size} processes has a device of its own",
            hint="set run.device to cuda",
        )
    if world.local_rank >= (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"process {world.local_rank + 1} of this machine has no GPU: torch sees {devices}",
            hint="start at most one process for each GPU",
        )


def refuse_differences(world: World, what: str, here: Mapping[str, Any]) -> None:  # Any: JSON values
    """Raise, on all ranks, when one of them has another value than rank 0 under some key."""
    mine = dict(flat_keys(here))
    for rank, theirs in enumerate(found := world.gather(mine)):
        odd = [key for key in {**found[0], **theirs} if found[0].get(key) != theirs.get(key)]
        if odd:
            shown = "; ".join(f"{key}: {found[0].get(key)} and {theirs.get(key)}" for key in odd[:4])
            raise ConfigError(
                f"rank 0 and rank {rank} do not have the same {what}: {shown}",
                hint="give every machine the same files and the same command",
            )


@torch.no_grad()
def start_alike(world: World, parameters: Iterable[nn.Parameter]) -> None:
    """Give every rank the trained weights of rank 0: some are random, or rounded by another machine."""
    if world.size == 1:
        return
    for parameter in parameters:
        if parameter.is_meta:
            raise RunError("a trained weight has no numbers yet")
        dist.broadcast(parameter.detach(), src=0)


def seed_rank(world: World, seed: int) -> None:
    """What is random in a forward pass (dropout) is random on each rank in its own way."""
    if world.size > 1:
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * world.share) % 2**63)
