"""The hardware of a plan: a kind of device, and how many of them share the work."""

import dataclasses
import math
from dataclasses import dataclass

import psutil
import torch

from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.hardware import Precision, chip_by_name, choose_device, choose_precision, driver_name, find_peak
from whet.models.spec import AttentionSpec, BlockSpec, ModelSpec
from whet.parallel.preflight import check_sharding

_NO_BF16 = ("v100", "v100-pcie", "t4")
_USABLE_FRACTION = 0.95  # of a device's memory; the rest is lost to allocator fragmentation


@dataclass(frozen=True)
class Target:
    """The kind of device that a run is planned for."""

    name: str
    kind: str  # cpu, cuda or mps
    memory: int  # bytes
    tflops: float  # peak in the compute dtype
    link_gb_s: float  # bandwidth to devices of the same machine, one way; 0: not known
    source: str  # source of the peak figure
    precision: Precision

    @property
    def usable_memory(self) -> int:
        """The bytes of memory that a run can use."""
        return int(self.memory * _USABLE_FRACTION)


def find_target(name: str | None, config: RunConfig) -> Target:
    """Return the device of a plan.

    Args:
        name: A chip such as "h100", "cpu", or None or "this" for the device that the config runs on.
        config: The run's config, for its device and precision.
    """
    precision_name = config.run.precision
    if name is None or name.lower() in ("this", "cpu"):
        device = torch.device("cpu") if name and name.lower() == "cpu" else choose_device(config.run.device)
        precision, peak = choose_precision(precision_name, device), find_peak(device)
        memory, label = psutil.virtual_memory().total, f"the {device.type} of this machine"
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            label = driver_name(device)
        return Target(label, device.type, memory, peak.tflops(precision.compute), 0.0, peak.source, precision)
    chip = chip_by_name(name)
    kind = "mps" if "Apple" in chip.pattern else "cuda"
    if precision_name == "auto":
        precision_name = "fp32" if kind == "mps" or chip.name in _NO_BF16 else "bf16"
    precision = choose_precision(precision_name, torch.device("cpu"))
    memory, tflops = int(chip.memory_gb * 1e9), chip.tflops(precision.compute)
    return Target(chip.name, kind, memory, tflops, chip.link_gb_s, chip.source, precision)


@dataclass(frozen=True)
class Cluster:
    """How a run is distributed over devices."""

    devices: int = 1
    kind: str = "none"  # none, ddp or fsdp
    tensor: int = 1  # tensor-parallel size
    per_node: int = 8
    network_gb_s: float = 50.0  # bandwidth of one device to other machines, one way

    @property
    def shares(self) -> int:
        """The data-parallel size: into how many parts a step is split."""
        return self.devices // self.tensor

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP shards the weights, so that a device stores only a part of them."""
        return self.kind == "fsdp" and self.shares > 1

    def bandwidth_gb_s(self, target: Target) -> float:
        """Return the bandwidth of a ring over all devices, in GB/s per device, or 0 if it is not known.

        Every device of a machine has its own ring over the network, so the rings together reach the
        bandwidth of all network adapters of the machine.
        """
        if self.devices <= self.per_node or not target.link_gb_s:
            return target.link_gb_s
        return min(target.link_gb_s, self.network_gb_s * self.per_node)


def find_cluster(config: RunConfig, devices: int, *, network_gb_s: float = 50.0) -> Cluster:
    """Return how the config's `parallel` section distributes a run over devices.

    Args:
        config: The run's config.
        devices: The number of devices.
        network_gb_s: Bandwidth of one device to other machines.

    Raises:
        ConfigError: A value is out of range, or the config does not work on this many devices.
    """
    if devices < 1:
        raise ConfigError(f"--gpus {devices}: it must be at least 1")
    if not 0 < network_gb_s < math.inf:
        raise ConfigError(f"--network {network_gb_s:g}: it must be positive and finite")
    parallel = config.parallel
    parallel.check_processes(devices)
    if devices == 1:
        return Cluster()
    if parallel.kind == "fsdp":
        check_sharding(config)
    return Cluster(devices, parallel.kind, parallel.tensor, network_gb_s=network_gb_s)


def shard_layers(spec: ModelSpec, tensor: int) -> ModelSpec:
    """Return the layers of one tensor-parallel rank: its share of the heads and of the hidden units."""
    if tensor == 1:
        return spec

    def shard_size(name: str, size: int) -> int:
        if size % tensor:
            raise ConfigError(f"parallel.tensor {tensor} does not divide the model's {name} ({size})")
        return size // tensor

    def shard_block(block: BlockSpec) -> BlockSpec:
        attention, feedforward = block.attention, block.feedforward
        if isinstance(attention, AttentionSpec):
            heads = shard_size("heads", attention.heads)
            kv_heads = shard_size("kv_heads", attention.kv_heads)
            attention = dataclasses.replace(attention, heads=heads, kv_heads=kv_heads)
        elif attention is not None:
            attention = dataclasses.replace(attention, heads=shard_size("heads", attention.heads))
        if feedforward is not None:
            feedforward = dataclasses.replace(feedforward, width=shard_size("width", feedforward.width))
        return dataclasses.replace(block, attention=attention, feedforward=feedforward)

    return dataclasses.replace(spec, blocks=tuple(map(shard_block, spec.blocks)))
