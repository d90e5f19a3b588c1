"""Routers of mixture-of-experts models during a run: metrics, collapse warnings and bias balancing."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whet.config.router_balancing import RouterBalancing
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.models.moe import BALANCE_BIAS, MixtureOfExperts, moe_layers
from whet.objectives.objective import Objective
from whet.objectives.router_losses import LOAD_BALANCING, STATISTICS, SUMS, Z_LOSS, RoutedObjective
from whet.ops.grouped_experts import describe_expert_matmuls
from whet.training.callbacks import Injector, Metrics, ModelCallback

log = logging.getLogger("whet")

_DIGITS = 6
_COLLAPSE_THRESHOLD = 0.25  # minimum share of effective experts; 0: top_k experts, 1: all
_EVEN_TOLERANCE = 1e-5  # relative to the mean load; covers rounding in any order of summation
_MIN_CHOICES = 8  # mean choices per expert that a step needs for a collapse to be detected


class RouterMetrics(ModelCallback, Injector):
    """Converts the router statistics of a step to metrics, and updates the balancing bias if configured.

    Args:
        layers: The mixture-of-experts layers.
        layer_indices: The indices of these layers in the model.
        bias_rate: The step size of the balancing bias; 0 for none.
    """

    state_key = "router-metrics"

    def __init__(
        self, layers: Sequence[MixtureOfExperts], layer_indices: Sequence[int], *, bias_rate: float = 0.0
    ) -> None:
        self.layers = layers
        self.layer_indices = list(layer_indices)
        self.bias_rate = bias_rate
        self.warned = False

    def touches_model(self, step: int) -> bool:
        """Return whether this callback updates the bias, which the next step must use."""
        return self.bias_rate > 0

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Replace the raw statistics of the step by metrics, and update the bias."""
        if STATISTICS not in metrics:
            return
        statistics = np.array(metrics.pop(STATISTICS))
        experts = self.layers[0].spec.experts
        choices, firsts, sums = np.split(statistics, (experts, 2 * experts), axis=1)
        shares = choices / choices.sum(1, keepdims=True)
        metrics |= router_metrics(shares, firsts, dict(zip(SUMS, sums.T, strict=True)), self.layer_indices)
        self._warn_of_collapse(step, metrics, shares)
        if self.bias_rate and not metrics.get("skipped"):
            self._balance(shares)

    def _warn_of_collapse(self, step: int, metrics: Metrics, shares: np.ndarray) -> None:
        spec = self.layers[0].spec
        if self.warned or metrics["tokens"] * spec.top_k < _MIN_CHOICES * spec.experts:
            return
        used = [effective_experts(share) for share in shares]
        limit = spec.top_k + _COLLAPSE_THRESHOLD * (spec.experts - spec.top_k)
        collapsed = [f"{n} ({u:.1f})" for n, u in zip(self.layer_indices, used, strict=True) if u < limit]
        if collapsed:
            self.warned = True
            log.warning(
                "step %d: routers have collapsed: experts in use, of %d per layer: layer %s; "
                "see experts.load_balancing and docs/experts.md",
                *(step, spec.experts, ", layer ".join(collapsed)),
            )

    @torch.no_grad()
    def _balance(self, shares: np.ndarray) -> None:
        """Raise the bias of experts below the mean load, and lower it above the mean (arXiv 2408.15664)."""
        for layer, share in zip(self.layers, shares, strict=True):
            bias = layer.get_buffer(BALANCE_BIAS)
            deficit = 1 - share / share.mean()
            steps = np.where(np.abs(deficit) > _EVEN_TOLERANCE, np.sign(deficit), 0.0)
            bias.add_(torch.as_tensor(steps).to(bias), alpha=self.bias_rate)

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return whether a warning was logged, so that a resumed run does not repeat it."""
        return {"warned": self.warned}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore what `state` returned."""
        self.warned = state["warned"]


def router_metrics(
    shares: np.ndarray, firsts: np.ndarray, sums: dict[str, np.ndarray], layers: list[int]
) -> Metrics:
    """Return the router metrics of a step.

    Args:
        shares: The share of each expert in the choices of its layer [layers, experts].
        firsts: How often each expert was the first choice [layers, experts].
        sums: Sums over tokens, one value per layer [layers]; the keys are SUMS.
        layers: The indices of the layers in the model.
    """
    tokens = sums["tokens"]
    means = {name: sums[name] / tokens for name in SUMS if name != "tokens"}
    metrics = {
        "router_entropy_mean": means["entropy"].mean(),
        "per_expert_share": shares.mean(0),
        "router_layers": np.array(layers),
        "router_entropy": means["entropy"],
        "router_confidence": means["confidence"],
        "router_share": shares,
        "router_top1_share": firsts / tokens[:, None],
        "router_max_violation": shares.max(1) * shares.shape[1] - 1,
        "router_dead_experts": (shares == 0).sum(1),
        "router_dropped_tokens": np.array(0),  # experts have no capacity limit, so no token is dropped
        LOAD_BALANCING: means[LOAD_BALANCING].mean(),
        Z_LOSS: means[Z_LOSS].mean(),
    }
    return {name: np.round(value, _DIGITS).tolist() for name, value in metrics.items()}


def effective_experts(share: np.ndarray) -> float:
    """Return the exponential of the entropy of the experts' load: the number of experts if used evenly."""
    used = share[share > 0]
    return math.exp(-float((used * np.log(used)).sum()))


def add_router_objective(
    objective: Objective, model: LanguageModel, section: RouterBalancing, *, compute: torch.dtype
) -> tuple[Objective, list[Injector]]:
    """Add router losses and router metrics to the objective of a mixture-of-experts model.

    Args:
        objective: The objective of the run.
        model: The model; if it has no experts, the objective is returned unchanged.
        section: The section `experts` of the config.
        compute: The compute dtype of the run.

    Returns:
        The objective to train with, and the callbacks that report router metrics.
    """
    layers = moe_layers(model)
    requested = [name for name, value in section.model_dump().items() if value]
    if not layers and requested:
        raise ConfigError(f"experts.{requested[0]}: whet finds no experts in this model")
    if not layers:
        return objective, []
    if section.bias_rate and not layers[0].spec.balance_bias:
        raise ConfigError(
            "experts.bias_rate: the routers of this model have no balancing bias",
            hint="a model like {preset: nano-moe, balance_bias: true} has one",
        )
    routed = RoutedObjective(objective, layers, load_balancing=section.load_balancing, z_loss=section.z_loss)
    spec, weight = layers[0].spec, layers[0].experts.down_proj
    log.info(
        "experts: %d in each of %d layers, %d per token; computed %s",
        *(spec.experts, len(layers), spec.top_k),
        describe_expert_matmuls(weight.device, compute, tuple(weight.shape[1:]), model.paths),
    )
    for term in routed.per_micro_batch:
        log.info("%s is averaged over micro-batches, so it depends on run.micro_batch_tokens", term)
    return routed, [RouterMetrics(layers, _moe_layer_indices(model), bias_rate=section.bias_rate)]


def _moe_layer_indices(model: LanguageModel) -> list[int]:
    return [index for index, block in enumerate(model.blocks()) if moe_layers(block)]
