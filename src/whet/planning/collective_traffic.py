"""What devices send each other in a step, and how long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.planning.devices import Cluster, Target

_REACHED = 0.8  # of a link's rate by collectives of some size


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in a step, and seconds of them."""

    gathered: float  # weights, for forward and backward passes
    added_up: float  # gradients
    layers: float  # of layers that are computed together
    bandwidth_gb_s: float
    hidden_s: float  # behind computing
    exposed_s: float  # not

    @property
    def known(self) -> bool:
        """Whether the bandwidth is."""
        return self.bandwidth_gb_s > 0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.gathered + self.added_up + self.layers


def traffic(
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
    """Of one device, in rings: of n, each sends (n - 1) / n of what is gathered, and twice that of sums.

    `trained` counts weights, `weights` bytes that are held. Layers that are computed together add up
    their outputs twice forward and twice back.
    """
    if cluster.devices == 1:
        return None
    size, ring = target.precision.compute.itemsize, (cluster.shares - 1) / cluster.shares
    gathered = summed = together = 0.0
    if cluster.kind == "ddp":
        summed = 2 * ring * 4 * trained
    else:
        # trained weights are gathered in the dtype that is computed in, frozen ones as they are held
        held = trained * size + max(0, weights - trained * target.precision.trained.itemsize)
        gathered = 2 * micro_batches * ring * held / cluster.tensor
        summed = micro_batches * ring * 4 * trained / cluster.tensor
    if cluster.tensor > 1:
        ring = 2 * (cluster.tensor - 1) / cluster.tensor
        together = 4 * layers * micro_batches * ring * positions * d_model * size
    bandwidth = cluster.bandwidth_gb_s(target)
    rate = bandwidth * 1e9 * _REACHED
    near = (target.link_gb_s if cluster.tensor <= cluster.per_node else bandwidth) * 1e9 * _REACHED
    return Traffic(
        gathered=gathered,
        added_up=summed,
        layers=together,
        bandwidth_gb_s=bandwidth,
        hidden_s=(gathered + summed) / rate if rate else 0.0,
        exposed_s=together / near if near else 0.0,
    )


def of_one_step(cluster: Cluster, parts: Sequence[Traffic | None]) -> Traffic | None:
    """Of the parts of a mix, which are all in every step."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if cluster.kind == "ddp":  # gradients are added up once a step, however many micro-batches it has
        return known[0]
    return Traffic(
        gathered=sum(part.gathered for part in known),
        added_up=sum(part.added_up for part in known),
        layers=sum(part.layers for part in known),
        bandwidth_gb_s=known[0].bandwidth_gb_s,
        hidden_s=sum(part.hidden_s for part in known),
        exposed_s=sum(part.exposed_s for part in known),
    )
