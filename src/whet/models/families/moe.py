"""What families with experts share: config fields, and the tensors of each expert in files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from whet.models.families import config_fields
from whet.models.families.config_fields import Config, integer
from whet.models.spec import ExpertsSpec, FeedForwardSpec, ModelSpec

Parts = Sequence[Sequence[str]]  # for each expert, the tensors that one after the other are its weight


def read_experts(config: Config, *, width: str, renormalise: bool) -> ExpertsSpec:
    """The experts of a config; transformers 5 writes one key for their number, and the hub has another."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return ExpertsSpec(
        experts=integer(config, key),
        top_k=integer(config, "num_experts_per_tok"),
        width=integer(config, width),
        activation=config_fields.activation(config),
        renormalise=renormalise,
    )


def with_experts(spec: ModelSpec, experts: ExpertsSpec, *, dense: Sequence[int] = ()) -> ModelSpec:
    """The model with experts instead of every feed-forward layer, but for those in `dense`."""
    blocks = (
        block if layer in dense else replace(block, feedforward=experts)
        for layer, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=tuple(blocks))


def without_experts(spec: ModelSpec) -> ModelSpec:
    """The model with a feed-forward layer of an expert's width in place of the experts."""
    blocks = (
        replace(block, feedforward=FeedForwardSpec(each.width, each.activation))
        if isinstance(each := block.feedforward, ExpertsSpec)
        else block
        for block in spec.blocks
    )
    return replace(spec, blocks=tuple(blocks))


def parts_by(*kinds: str, inside: str = "mlp") -> Callable[[ModelSpec, str], Parts | None]:
    """The `stored_parts` of a family that calls gate, up and down projections of an expert by these names."""
    gate, up, down = kinds

    def stored_parts(spec: ModelSpec, name: str) -> Parts | None:
        found = re.fullmatch(r"(layers\.\d+)\.mlp\.(?:experts\.(gate_up_proj|down_proj)|gate\.weight)", name)
        if found is None:
            return None
        layer = f"model.{found[1]}.{inside}"
        if found[2] is None:
            return [[f"{layer}.gate.weight"]]
        names = [gate, up] if found[2] == "gate_up_proj" else [down]
        experts = spec.mixtures[0].experts
        return [[f"{layer}.experts.{expert}.{each}.weight" for each in names] for expert in range(experts)]

    return stored_parts


def split_parts(tensor: torch.Tensor, parts: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
    """Views of a tensor [experts, rows, columns], by name: of each expert one, or several of as many rows.

    A tensor of fewer dimensions is one part.
    """
    if tensor.dim() < 3:
        [[name]] = parts
        return {name: tensor}
    return {
        name: view
        for names, one in zip(parts, tensor, strict=True)
        for name, view in zip(names, one.chunk(len(names)), strict=True)
    }
