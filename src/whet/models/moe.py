"""Mixtures of experts: a router, the experts it chooses from, and a record of what it chose."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.feedforward import ACTIVATIONS, FeedForward
from whet.models.spec import ExpertsSpec, FeedForwardSpec
from whet.ops.dispatch import chosen_paths
from whet.ops.grouped_experts import combine, dispatch, grouped_linear, sort_by_expert

# adds something to a product: the weight's name, the rows, where each expert's end or whose all of them are
Update = Callable[[str, torch.Tensor, torch.Tensor | int], torch.Tensor | None]

BALANCE_BIAS = "expert_bias"


class Router(nn.Linear):
    """Scores of the experts. A type of its own: it is no layer to put into 4 bits, or to adapt unasked."""


class Routing(NamedTuple):
    """What a router made of some tokens."""

    logits: torch.Tensor  # [tokens, experts], with their gradient
    chosen: torch.Tensor  # [tokens, top_k], the highest score first


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores of all experts, in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def route(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts each token goes to [tokens, top_k], and what their outputs are multiplied by."""
    scores = scores_of(logits, spec.scoring)
    chosen = (scores if bias is None else scores + bias).topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all round to 0
    return chosen, weights if spec.scale == 1.0 else weights * spec.scale


class Experts(nn.Module):
    """The weights of a layer's experts, each kind in one tensor [experts, out, in]."""

    def __init__(self, spec: ExpertsSpec, *, d_model: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.paths = chosen_paths()
        self.gate_up_proj = nn.Parameter(torch.empty(spec.experts, 2 * spec.width, d_model))
        self.down_proj = nn.Parameter(torch.empty(spec.experts, d_model, spec.width))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # group sizes are data: nothing to compile
    def forward(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        update: Update | None = None,
    ) -> torch.Tensor:
        """The weighted outputs of the chosen experts for x [tokens, d_model]."""
        if not self.paths.grouped_experts:
            return self._one_by_one(x, chosen, weights, update)
        groups = sort_by_expert(chosen, len(self.down_proj))

        def product(name: str, rows: torch.Tensor) -> torch.Tensor:
            found = grouped_linear(rows, getattr(self, name), groups.ends)
            more = None if update is None else update(name, rows, groups.ends)
            return found if more is None else found + more

        gate, up = product("gate_up_proj", dispatch(x, groups)).chunk(2, dim=-1)
        return combine(product("down_proj", self.activation(gate) * up), weights, groups).to(x.dtype)

    def _one_by_one(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, update: Update | None
    ) -> torch.Tensor:
        """A loop over the experts, in plain torch."""

        def product(name: str, rows: torch.Tensor, expert: int) -> torch.Tensor:
            y = F.linear(rows, getattr(self, name)[expert])
            more = None if update is None else update(name, rows, expert)
            return y if more is None else y + more

        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
        for expert in range(len(self.down_proj)):
            tokens, choices = (chosen == expert).nonzero(as_tuple=True)
            gate, up = product("gate_up_proj", x[tokens], expert).chunk(2, dim=-1)
            y = product("down_proj", self.activation(gate) * up, expert)
            total = total.index_add(0, tokens, (y * weights[tokens, choices, None]).to(total.dtype))
        return total.to(x.dtype)


class MixtureOfExperts(nn.Module):
    """Route, send each token to its experts, and add what the shared ones say. No token is ever dropped."""

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
        self.record: list[Routing] | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The bias stays in float32, whatever the weights are: its steps are small."""
        bias = self._buffers.get(BALANCE_BIAS)
        super()._apply(fn, recurse)
        if bias is not None and (moved := self._buffers[BALANCE_BIAS]) is not None:
            self._buffers[BALANCE_BIAS] = moved.float() if bias.is_meta else bias.to(moved.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position on its own."""
        flat = x.flatten(0, -2)
        logits = self.gate(flat)
        chosen, weights = route(logits, self.spec, getattr(self, BALANCE_BIAS, None))
        if self.record is not None and torch.is_grad_enabled():
            self.record.append(Routing(logits, chosen))
        y = self.experts(flat, chosen, weights)
        if self.spec.shared:
            y = y + self.shared_experts(flat)
        return y.view_as(x)


def make_feedforward(spec: FeedForwardSpec | ExpertsSpec, *, d_model: int) -> nn.Module:
    """The layer a spec describes."""
    kind = MixtureOfExperts if isinstance(spec, ExpertsSpec) else FeedForward
    return kind(spec, d_model=d_model)  # type: ignore[arg-type]  # chosen by its type


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """The layers of a model that have experts, in order."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def balance_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """The biases of experts by name: what training changes and no gradient reaches."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BALANCE_BIAS}")}


@contextlib.contextmanager
def recording(layers: list[MixtureOfExperts]) -> Iterator[list[list[Routing]]]:
    """What the routers do in a `with` block, layer by layer: of forwards with gradients, each once.

    Gradient checkpointing computes a layer again in the backward pass, when nothing is recorded any more.
    Inside the layer nothing is computed from the logits, so both times it saves the same tensors. Who
    records around this block is given the same.
    """
    records: list[list[Routing]] = [[] for _ in layers]
    around = [layer.record for layer in layers]
    for layer, record in zip(layers, records, strict=True):
        layer.record = record
    try:
        yield records
    finally:
        for layer, record, outer in zip(layers, records, around, strict=True):
            layer.record = outer
            if outer is not None:
                outer.extend(record)
