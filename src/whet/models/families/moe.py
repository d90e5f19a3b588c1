"""Shared code of families with experts: config fields, and the tensors of each expert in files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from whet.models.families import config_fields
from whet.models.families.config_fields import Config, integer
from whet.models.spec import ExpertsSpec, FeedForwardSpec, ModelSpec

Parts = Sequence[Sequence[str]]  # per expert, the names of the tensors that are concatenated to its weight


def read_experts(config: Config, *, width: str, renormalise: bool) -> ExpertsSpec:
    """Return the experts of a config. transformers 5 and the hub use different keys for their number."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return ExpertsSpec(
        experts=integer(config, key),
        top_k=integer(config, "num_experts_per_tok"),
        width=integer(config, width),
        activation=config_fields.activation(config),
        renormalise=renormalise,
    )


def with_experts(spec: ModelSpec, experts: ExpertsSpec, *, dense: Sequence[int] = ()) -> ModelSpec:
    """Return the spec with experts in every layer except those listed in `dense`."""
    blocks = (
        block if layer in dense else replace(block, feedforward=experts)
        for layer, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=tuple(blocks))


def without_experts(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the experts replaced by one feed-forward layer of the width of an expert."""
    blocks = (
        replace(block, feedforward=FeedForwardSpec(mixture.width, mixture.activation))
        if isinstance(mixture := block.feedforward, ExpertsSpec)
        else block
        for block in spec.blocks
    )
    return replace(spec, blocks=tuple(blocks))


def expert_parts(*names: str, module: str = "mlp") -> Callable[[ModelSpec, str], Parts | None]:
    """Return the `stored_tensor_names` of a family with these names of gate, up and down projections."""
    gate, up, down = names

    def stored_tensor_names(spec: ModelSpec, name: str) -> Parts | None:
        match = re.fullmatch(r"(layers\.\d+)\.mlp\.(?:experts\.(gate_up_proj|down_proj)|gate\.weight)", name)
        if match is None:
            return None
        layer = f"model.{match[1]}.{module}"
        if match[2] is None:
            return [[f"{layer}.gate.weight"]]
        projections = [gate, up] if match[2] == "gate_up_proj" else [down]
        experts = spec.expert_specs[0].experts
        return [
            [f"{layer}.experts.{expert}.{projection}.weight" for projection in projections]
            for expert in range(experts)
        ]

    return stored_tensor_names


def split_parts(tensor: torch.Tensor, parts: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
    """Return views of a tensor [experts, rows, columns] by name, one or more equal chunks per expert.

    A tensor with fewer dimensions has a single part.
    """
    if tensor.dim() < 3:
        [[name]] = parts
        return {name: tensor}
    return {
        name: view
        for names, weight in zip(parts, tensor, strict=True)
        for name, view in zip(names, weight.chunk(len(names)), strict=True)
    }
