"""Routers during a run: numbers in every row, a warning when one collapses, and the bias that balances."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whet.config.router_balancing import RouterBalancing
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.models.moe import BALANCE_BIAS, MixtureOfExperts, mixtures
from whet.objectives.objective import Objective
from whet.objectives.router_losses import LOAD_BALANCING, STATISTICS, SUMS, Z_LOSS, RoutedObjective
from whet.ops.grouped_experts import describe_grouped
from whet.training.callbacks import Injector, Metrics, ModelCallback

log = logging.getLogger("whet")

_DIGITS = 6
_COLLAPSED = 0.25  # of the way from top_k experts in use to all of them
_EVEN = 1e-5  # of the mean load: what rounding may make of none at all, in whatever order it is added up
_JUDGED = 8  # choices an expert must have had a chance of in a step, for the step to tell anything


class RouterMetrics(ModelCallback, Injector):
    """Turns the routers' statistics of a step into numbers to read, and moves the bias where asked to."""

    state_key = "router-metrics"

    def __init__(
        self, layers: Sequence[MixtureOfExperts], numbers: Sequence[int], *, bias_rate: float = 0.0
    ) -> None:
        self.layers = layers
        self.numbers = list(numbers)  # of the layers in the model
        self.bias_rate = bias_rate
        self.warned = False

    def touches_model(self, step: int) -> bool:
        """Return whether it moves the bias, which the next step must see."""
        return self.bias_rate > 0

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Write this step's numbers."""
        if STATISTICS not in metrics:
            return
        found = np.array(metrics.pop(STATISTICS))
        experts = self.layers[0].spec.experts
        choices, firsts, sums = np.split(found, (experts, 2 * experts), axis=1)
        shares = choices / choices.sum(1, keepdims=True)
        metrics |= readable(shares, firsts, dict(zip(SUMS, sums.T, strict=True)), self.numbers)
        self._warn_of_collapse(step, metrics, shares)
        if self.bias_rate and not metrics.get("skipped"):
            self._balance(shares)

    def _warn_of_collapse(self, step: int, metrics: Metrics, shares: np.ndarray) -> None:
        spec = self.layers[0].spec
        if self.warned or metrics["tokens"] * spec.top_k < _JUDGED * spec.experts:
            return
        used = [effective_experts(share) for share in shares]
        limit = spec.top_k + _COLLAPSED * (spec.experts - spec.top_k)
        fallen = [f"{n} ({u:.1f})" for n, u in zip(self.numbers, used, strict=True) if u < limit]
        if fallen:
            self.warned = True
            log.warning(
                "step %d: routers have collapsed: of %d experts a layer, so many are in use: layer %s; "
                "see experts.load_balancing and docs/experts.md",
                *(step, spec.experts, ", layer ".join(fallen)),
            )

    @torch.no_grad()
    def _balance(self, shares: np.ndarray) -> None:
        """A step up for experts below the mean load, and down for those above it (arXiv 2408.15664)."""
        for layer, share in zip(self.layers, shares, strict=True):
            bias = layer.get_buffer(BALANCE_BIAS)
            lacking = 1 - share / share.mean()
            steps = np.where(np.abs(lacking) > _EVEN, np.sign(lacking), 0.0)
            bias.add_(torch.as_tensor(steps).to(bias), alpha=self.bias_rate)

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """A resumed run does not warn again."""
        return {"warned": self.warned}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Go on from `state`."""
        self.warned = state["warned"]


def readable(
    shares: np.ndarray, firsts: np.ndarray, sums: dict[str, np.ndarray], layers: list[int]
) -> Metrics:
    """The row's numbers, from the choices of each layer [layers, experts] and its sums over tokens."""
    tokens = sums["tokens"]
    means = {name: sums[name] / tokens for name in SUMS if name != "tokens"}
    found = {
        "router_entropy_mean": means["entropy"].mean(),
        "per_expert_share": shares.mean(0),
        "router_layers": np.array(layers),
        "router_entropy": means["entropy"],
        "router_confidence": means["confidence"],
        "router_share": shares,
        "router_top1_share": firsts / tokens[:, None],
        "router_max_violation": shares.max(1) * shares.shape[1] - 1,
        "router_dead_experts": (shares == 0).sum(1),
        "router_dropped_tokens": np.array(0),  # experts have no capacity: every token reaches all it chose
        LOAD_BALANCING: means[LOAD_BALANCING].mean(),
        Z_LOSS: means[Z_LOSS].mean(),
    }
    return {name: np.round(value, _DIGITS).tolist() for name, value in found.items()}


def effective_experts(share: np.ndarray) -> float:
    """How many experts in even use are as varied as these: the exponential of the entropy of their load."""
    used = share[share > 0]
    return math.exp(-float((used * np.log(used)).sum()))


def with_routers(
    objective: Objective, model: LanguageModel, section: RouterBalancing, *, compute: torch.dtype
) -> tuple[Objective, list[Injector]]:
    """The objective with what a model's routers add to it, and who reports them; without any, as it is."""
    layers = mixtures(model)
    wanted = [name for name, value in section.model_dump().items() if value]
    if not layers and wanted:
        raise ConfigError(f"experts.{wanted[0]}: this model has no experts that whet can see")
    if not layers:
        return objective, []
    if section.bias_rate and not layers[0].spec.balance_bias:
        raise ConfigError(
            "experts.bias_rate: this model has no bias on the choice of its experts",
            hint="model: {preset: nano-moe, balance_bias: true} has one",
        )
    routed = RoutedObjective(objective, layers, load_balancing=section.load_balancing, z_loss=section.z_loss)
    spec, weight = layers[0].spec, layers[0].experts.down_proj
    log.info(
        "experts: %d in each of %d layers, %d for a token; computed %s",
        *(spec.experts, len(layers), spec.top_k),
        describe_grouped(weight.device, compute, tuple(weight.shape[1:]), model.paths),
    )
    for term in routed.per_micro_batch:
        log.info("%s is a mean over micro-batches: it depends on run.micro_batch_tokens", term)
    return routed, [RouterMetrics(layers, _numbers(model), bias_rate=section.bias_rate)]


def _numbers(model: LanguageModel) -> list[int]:
    return [number for number, block in enumerate(model.blocks()) if mixtures(block)]
