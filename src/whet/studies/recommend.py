"""Recommend a model size and micro-batch per method for a device, from the plans of typical shapes."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from whet.config.load_config import validate_config
from whet.config.run_config import RunConfig
from whet.models.from_scratch.presets import PRESETS, Shape, build_spec
from whet.ops.dispatch import FAST, use_paths
from whet.planning.devices import Cluster, Target, find_target
from whet.planning.plan import Planner
from whet.planning.step_sizes import batch_shape

METHODS = ("full", "lora", "qlora")
MAX_LENGTH = 2048
RANK = 16
MARGIN = 0.1  # of the usable memory: left free by a recommended run

_LARGE = Shape(
    d_model=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    width=14336,
    vocab_size=128256,
    max_positions=8192,
    tied_head=False,
)
SHAPES = {  # those of SmolLM2 135M, Llama 3.2 1B and 3B, Llama 3.1 8B and 70B, Qwen3 14B and 32B
    "135M": PRESETS["llama-135m"],
    "1B": PRESETS["llama-1b"],
    "3B": dataclasses.replace(_LARGE, d_model=3072, layers=28, heads=24, width=8192, tied_head=True),
    "8B": _LARGE,
    "14B": dataclasses.replace(_LARGE, d_model=5120, layers=40, heads=40, width=17408, vocab_size=151936),
    "32B": dataclasses.replace(_LARGE, d_model=5120, layers=64, heads=64, width=25600, vocab_size=151936),
    "70B": dataclasses.replace(_LARGE, d_model=8192, layers=80, heads=64, width=28672),
}


@dataclass(frozen=True)
class Estimate:
    """The memory of one model size that trains with one method."""

    size: str
    method: str
    parameters: int
    peak: int  # bytes, with one document of MAX_LENGTH tokens per micro-batch


@dataclass(frozen=True)
class Recommendation:
    """The estimates of every size and method on a device, and the largest size per method."""

    target: Target
    estimates: tuple[Estimate, ...]
    best: dict[str, Estimate | None]  # by method: the largest size that leaves the margin free
    micro_batch_tokens: dict[str, int]  # by method: the largest value for `best` that leaves the margin free

    def verdict(self, estimate: Estimate) -> Literal["fits", "tight", "no"]:
        """Return whether a run fits into the usable memory; tight: without the margin."""
        if estimate.peak <= _with_margin(self.target).usable_memory:
            return "fits"
        return "tight" if estimate.peak <= self.target.usable_memory else "no"


def recommend(device: str | None = None) -> Recommendation:
    """Recommend model sizes for a device.

    Args:
        device: A chip such as "h200", "cpu", or None or "this" for the device of this machine.

    Raises:
        ConfigError: The device is unknown.
    """
    return recommend_for(find_target(device, _config("lora")))


@use_paths(FAST)  # as plans do
def recommend_for(target: Target, sizes: Iterable[str] = tuple(SHAPES)) -> Recommendation:
    """Recommend model sizes for a device whose memory is known.

    Args:
        target: The device.
        sizes: Keys of SHAPES, the smallest first.
    """
    available = _with_margin(target)
    estimates: list[Estimate] = []
    best: dict[str, Estimate | None] = {}
    micro_batch_tokens: dict[str, int] = {}
    for method in METHODS:
        planners = {size: _SizePlanner(size, method, available) for size in sizes}
        estimates += [planner.estimate for planner in planners.values()]
        fitting = [p for p in planners.values() if p.estimate.peak <= available.usable_memory]
        best[method] = fitting[-1].estimate if fitting else None
        if fitting:
            micro_batch_tokens[method] = fitting[-1].largest_micro_batch()
    return Recommendation(target, tuple(estimates), best, micro_batch_tokens)


class _SizePlanner:
    """Plans one size with one method, once."""

    def __init__(self, size: str, method: str, target: Target) -> None:
        config = _config(method)
        self._planner = Planner(config, target, Cluster(), build_spec(SHAPES[size]))
        self._shape, _ = batch_shape(config, self._planner.step)
        trace = self._planner.trace(self._shape, recompute=True, accumulate=True)
        peak = self._planner.memory(trace, accumulate=True).peak
        self.estimate = Estimate(size, method, sum(self._planner.parameters.values()), peak)

    def largest_micro_batch(self) -> int:
        """Return the largest run.micro_batch_tokens that fits."""
        documents = self._planner.largest_batch(self._shape, self.estimate.peak, accumulate=True)
        return documents * self._shape.length


def _with_margin(target: Target) -> Target:
    return dataclasses.replace(target, memory=int(target.memory * (1 - MARGIN)))


def _config(method: str) -> RunConfig:
    """Return a config with one document per micro-batch and gradient checkpointing."""
    rank = {} if method == "full" else {"rank": RANK, "alpha": 2 * RANK}
    return validate_config(
        {
            "model": "one of SHAPES",
            "method": {"kind": method, **rank},
            "data": {"train": "none", "max_length": MAX_LENGTH},
            "run": {
                "steps": 1,
                "batch_size": 64,
                "micro_batch_tokens": MAX_LENGTH,
                "grad_checkpoint": True,
            },
        }
    )
