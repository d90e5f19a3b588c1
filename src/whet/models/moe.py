"""Mixture-of-experts layers: the router, the experts, and recording of routing decisions."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.feedforward import ACTIVATIONS, FeedForward
from whet.models.spec import ExpertsSpec, FeedForwardSpec
from whet.ops.dispatch import current_paths
from whet.ops.grouped_experts import combine, dispatch, grouped_linear, sort_by_expert

# returns an adapter's update of an expert matmul, or None, from the name of the weight, the rows, and either
# the ends of the experts' rows or the index of the single expert that all rows belong to
Update = Callable[[str, torch.Tensor, torch.Tensor | int], torch.Tensor | None]

BALANCE_BIAS = "expert_bias"


class Router(nn.Linear):
    """The linear layer that scores the experts.

    It is a separate type because routers are not quantized, and not adapted by default.
    """


class Routing(NamedTuple):
    """The routing of a batch of tokens."""

    logits: torch.Tensor  # [tokens, experts], attached to the autograd graph
    chosen: torch.Tensor  # [tokens, top_k], in order of decreasing score


def router_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return the scores of all experts, in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def route(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each token [tokens, top_k], and the weights of their outputs."""
    scores = router_scores(logits, spec.scoring)
    chosen = (scores if bias is None else scores + bias).topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may underflow to 0
    return chosen, weights if spec.scale == 1.0 else weights * spec.scale


class Experts(nn.Module):
    """The experts of a layer. Each projection has one weight [experts, out, in] for all experts."""

    def __init__(self, spec: ExpertsSpec, *, d_model: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.paths = current_paths()
        self.gate_up_proj = nn.Parameter(torch.empty(spec.experts, 2 * spec.width, d_model))
        self.down_proj = nn.Parameter(torch.empty(spec.experts, d_model, spec.width))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # group sizes depend on the data
    def forward(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        update: Update | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs for x [tokens, d_model]."""
        if not self.paths.grouped_experts:
            return self._loop_over_experts(x, chosen, weights, update)
        groups = sort_by_expert(chosen, len(self.down_proj))

        def project(name: str, rows: torch.Tensor) -> torch.Tensor:
            output = grouped_linear(rows, getattr(self, name), groups.ends)
            adapter_update = None if update is None else update(name, rows, groups.ends)
            return output if adapter_update is None else output + adapter_update

        gate, up = project("gate_up_proj", dispatch(x, groups)).chunk(2, dim=-1)
        return combine(project("down_proj", self.activation(gate) * up), weights, groups).to(x.dtype)

    def _loop_over_experts(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, update: Update | None
    ) -> torch.Tensor:
        """Compute the output by a loop over the experts, in plain PyTorch."""

        def project(name: str, rows: torch.Tensor, expert: int) -> torch.Tensor:
            y = F.linear(rows, getattr(self, name)[expert])
            adapter_update = None if update is None else update(name, rows, expert)
            return y if adapter_update is None else y + adapter_update

        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
        for expert in range(len(self.down_proj)):
            tokens, choices = (chosen == expert).nonzero(as_tuple=True)
            gate, up = project("gate_up_proj", x[tokens], expert).chunk(2, dim=-1)
            y = project("down_proj", self.activation(gate) * up, expert)
            total = total.index_add(0, tokens, (y * weights[tokens, choices, None]).to(total.dtype))
        return total.to(x.dtype)


class MixtureOfExperts(nn.Module):
    """A mixture-of-experts layer with optional shared experts. No token is ever dropped."""

    def __init__(self, spec: ExpertsSpec, *, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Router(d_model, spec.experts, bias=False)
        self.experts = Experts(spec, d_model=d_model)
        if spec.shared:
            shared = FeedForwardSpec(width=spec.shared * spec.width, activation=spec.activation)
            self.shared_experts = FeedForward(shared, d_model=d_model)
        if spec.balance_bias:
            self.register_buffer(BALANCE_BIAS, torch.zeros(spec.experts))
        self.routing_records: list[Routing] | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Keep the bias in float32 in any precision, because its updates are small."""
        bias = self._buffers.get(BALANCE_BIAS)
        super()._apply(fn, recurse)
        if bias is not None and (moved := self._buffers[BALANCE_BIAS]) is not None:
            self._buffers[BALANCE_BIAS] = moved.float() if bias.is_meta else bias.to(moved.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position of x [..., d_model] independently."""
        flat = x.flatten(0, -2)
        logits = self.gate(flat)
        chosen, weights = route(logits, self.spec, getattr(self, BALANCE_BIAS, None))
        if self.routing_records is not None and torch.is_grad_enabled():
            self.routing_records.append(Routing(logits, chosen))
        y = self.experts(flat, chosen, weights)
        if self.spec.shared:
            y = y + self.shared_experts(flat)
        return y.view_as(x)


def make_feedforward(spec: FeedForwardSpec | ExpertsSpec, *, d_model: int) -> nn.Module:
    """Return the feed-forward layer described by a spec."""
    layer_class = MixtureOfExperts if isinstance(spec, ExpertsSpec) else FeedForward
    return layer_class(spec, d_model=d_model)  # type: ignore[arg-type]  # chosen by its type


def moe_layers(model: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixture-of-experts layers of a model in order."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def balance_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the expert biases by name. Training updates them without a gradient."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BALANCE_BIAS}")}


@contextlib.contextmanager
def record_routing(layers: list[MixtureOfExperts]) -> Iterator[list[list[Routing]]]:
    """Record the routing of each layer in the `with` block, for forward passes with gradients.

    Yields one list of `Routing` per layer. Gradient checkpointing recomputes layers in the backward pass,
    after the block, so each forward pass is recorded once. The layer computes nothing from the recorded
    logits, so recomputation saves the same tensors. An enclosing `record_routing` gets the same records.
    """
    records: list[list[Routing]] = [[] for _ in layers]
    outer_records = [layer.routing_records for layer in layers]
    for layer, record in zip(layers, records, strict=True):
        layer.routing_records = record
    try:
        yield records
    finally:
        for layer, record, outer in zip(layers, records, outer_records, strict=True):
            layer.routing_records = outer
            if outer is not None:
                outer.extend(record)
