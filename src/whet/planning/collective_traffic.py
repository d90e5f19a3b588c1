"""Estimate the communication between devices in a training step: bytes and seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.planning.devices import Cluster, Target

_LINK_UTILIZATION = 0.8  # fraction of a link's bandwidth that large collectives reach


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in a step, and the seconds that this takes."""

    gathered: float  # all-gather of weights in the forward and backward passes
    added_up: float  # all-reduce or reduce-scatter of gradients
    layers: float  # all-reduce of activations with tensor parallelism
    bandwidth_gb_s: float
    hidden_s: float  # overlapped with computation
    exposed_s: float  # not overlapped

    @property
    def known(self) -> bool:
        """Whether the bandwidth between the devices is known."""
        return self.bandwidth_gb_s > 0

    @property
    def total(self) -> float:
        """The total number of bytes."""
        return self.gathered + self.added_up + self.layers


def estimate_traffic(
    cluster: Cluster,
    target: Target,
    *,
    trained: int,
    weights: int,
    micro_batches: int,
    positions: int,
    d_model: int,
    layers: int,
) -> Traffic | None:
    """Return the traffic of one device in a step, or None for a single device.

    Ring collectives over n devices are assumed: each device sends (n - 1) / n of gathered data, and twice
    that for an all-reduce. Tensor parallelism all-reduces the outputs of each layer twice in the forward and
    twice in the backward pass.

    Args:
        cluster: The devices and how they share the work.
        target: The kind of device.
        trained: The number of trainable parameters.
        weights: The bytes of all parameters.
        micro_batches: Micro-batches per step and device.
        positions: Tokens per micro-batch.
        d_model: The size of the hidden states.
        layers: The number of layers.
    """
    if cluster.devices == 1:
        return None
    size, ring = target.precision.compute.itemsize, (cluster.shares - 1) / cluster.shares
    gathered = reduced = tensor_parallel = 0.0
    if cluster.kind == "ddp":
        reduced = 2 * ring * 4 * trained
    else:
        # trainable weights are gathered in the compute dtype, frozen ones in the dtype they are stored in
        frozen_bytes = max(0, weights - trained * target.precision.trained.itemsize)
        gathered = 2 * micro_batches * ring * (trained * size + frozen_bytes) / cluster.tensor
        reduced = micro_batches * ring * 4 * trained / cluster.tensor
    if cluster.tensor > 1:
        ring = 2 * (cluster.tensor - 1) / cluster.tensor
        tensor_parallel = 4 * layers * micro_batches * ring * positions * d_model * size
    bandwidth = cluster.bandwidth_gb_s(target)
    tensor_bandwidth = target.link_gb_s if cluster.tensor <= cluster.per_node else bandwidth
    bytes_per_s = bandwidth * 1e9 * _LINK_UTILIZATION
    tensor_bytes_per_s = tensor_bandwidth * 1e9 * _LINK_UTILIZATION
    return Traffic(
        gathered=gathered,
        added_up=reduced,
        layers=tensor_parallel,
        bandwidth_gb_s=bandwidth,
        hidden_s=(gathered + reduced) / bytes_per_s if bytes_per_s else 0.0,
        exposed_s=tensor_parallel / tensor_bytes_per_s if tensor_bytes_per_s else 0.0,
    )


def sum_traffic(cluster: Cluster, parts: Sequence[Traffic | None]) -> Traffic | None:
    """Return the traffic of a step of a mix, which contains a step of every part."""
    estimates = [part for part in parts if part is not None]
    if not estimates:
        return None
    if cluster.kind == "ddp":  # gradients are all-reduced once per step, not once per micro-batch
        return estimates[0]
    return Traffic(
        gathered=sum(part.gathered for part in estimates),
        added_up=sum(part.added_up for part in estimates),
        layers=sum(part.layers for part in estimates),
        bandwidth_gb_s=estimates[0].bandwidth_gb_s,
        hidden_s=sum(part.hidden_s for part in estimates),
        exposed_s=sum(part.exposed_s for part in estimates),
    )
