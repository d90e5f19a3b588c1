"""What a plan is for: a device, and how many of them work together."""

import dataclasses
import math
from dataclasses import dataclass

import psutil
import torch

from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.hardware import Precision, choose_device, choose_precision, driver_name, find_peak, named_chip
from whet.models.spec import AttentionSpec, BlockSpec, ModelSpec
from whet.parallel.preflight import check_sharding

_NO_BF16 = ("v100", "v100-pcie", "t4")
_SPARE = 0.95  # of a device's memory: fragments of an allocator fill the rest


@dataclass(frozen=True)
class Target:
    """A device."""

    name: str
    kind: str  # cpu, cuda or mps
    memory: int  # bytes
    tflops: float  # in the dtype of the matrix products
    link_gb_s: float  # to its neighbours, one way; 0: not known
    source: str
    precision: Precision

    @property
    def room(self) -> int:
        """What a run may fill."""
        return int(self.memory * _SPARE)


def find_target(name: str | None, config: RunConfig) -> Target:
    """A chip of the table, or a device here: cpu, or the one that the config runs on (`None` or this)."""
    wanted = config.run.precision
    if name is None or name.lower() in ("this", "cpu"):
        device = torch.device("cpu") if name and name.lower() == "cpu" else choose_device(config.run.device)
        precision, peak = choose_precision(wanted, device), find_peak(device)
        memory, label = psutil.virtual_memory().total, f"the {device.type} of this machine"
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            label = driver_name(device)
        return Target(label, device.type, memory, peak.tflops(precision.compute), 0.0, peak.source, precision)
    chip = named_chip(name)
    kind = "mps" if "Apple" in chip.pattern else "cuda"
    if wanted == "auto":
        wanted = "fp32" if kind == "mps" or chip.name in _NO_BF16 else "bf16"
    precision = choose_precision(wanted, torch.device("cpu"))
    memory, tflops = int(chip.memory_gb * 1e9), chip.tflops(precision.compute)
    return Target(chip.name, kind, memory, tflops, chip.link_gb_s, chip.source, precision)


@dataclass(frozen=True)
class Cluster:
    """How a run is spread over devices."""

    devices: int = 1
    kind: str = "none"  # none, ddp or fsdp
    tensor: int = 1  # devices that compute each layer together
    per_node: int = 8
    network_gb_s: float = 50.0  # of one device to other machines, one way

    @property
    def shares(self) -> int:
        """Into how many parts a step is cut."""
        return self.devices // self.tensor

    @property
    def cuts_weights(self) -> bool:
        """Whether a device holds a part of each weight."""
        return self.kind == "fsdp" and self.shares > 1

    def bandwidth_gb_s(self, target: Target) -> float:
        """What a device sends to the next one of a ring through all of them; 0: not known.

        Each of a machine's devices has a ring of its own over the network, so that together they carry as
        much as all of its adapters.
        """
        if self.devices <= self.per_node or not target.link_gb_s:
            return target.link_gb_s
        return min(target.link_gb_s, self.network_gb_s * self.per_node)


def find_cluster(config: RunConfig, devices: int, *, network_gb_s: float = 50.0) -> Cluster:
    """The config's `parallel` section on so many devices."""
    if devices < 1:
        raise ConfigError(f"--gpus {devices}: there must be at least one")
    if not 0 < network_gb_s < math.inf:
        raise ConfigError(f"--network {network_gb_s:g}: it must be positive")
    parallel = config.parallel
    parallel.check_processes(devices)
    if devices == 1:
        return Cluster()
    if parallel.kind == "fsdp":
        check_sharding(config)
    return Cluster(devices, parallel.kind, parallel.tensor, network_gb_s=network_gb_s)


def share_of_layers(spec: ModelSpec, tensor: int) -> ModelSpec:
    """What one of `tensor` devices computes of each layer: its heads, and its part of the hidden units."""
    if tensor == 1:
        return spec

    def part(name: str, size: int) -> int:
        if size % tensor:
            raise ConfigError(f"parallel.tensor {tensor} does not divide the model's {name} ({size})")
        return size // tensor

    def block(own: BlockSpec) -> BlockSpec:
        attention, feedforward = own.attention, own.feedforward
        if isinstance(attention, AttentionSpec):
            heads, shared = part("heads", attention.heads), part("kv_heads", attention.kv_heads)
            attention = dataclasses.replace(attention, heads=heads, kv_heads=shared)
        elif attention is not None:
            attention = dataclasses.replace(attention, heads=part("heads", attention.heads))
        if feedforward is not None:
            feedforward = dataclasses.replace(feedforward, width=part("width", feedforward.width))
        return dataclasses.replace(own, attention=attention, feedforward=feedforward)

    return dataclasses.replace(spec, blocks=tuple(map(block, spec.blocks)))
