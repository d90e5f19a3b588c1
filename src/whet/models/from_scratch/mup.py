"""muP: transfer of the learning rate from narrow to wide models (Tensor Programs V, arXiv 2203.03466)."""

import dataclasses
from typing import Literal, NamedTuple

import torch

from whet.config.optim import MuP
from whet.errors import ConfigError
from whet.models.spec import AttentionSpec, BlockSpec, ModelSpec

Role = Literal["input", "hidden", "output", "router"]


class Powers(NamedTuple):
    """Exponents of the width ratio (width / base width) that scale initialization and learning rates."""

    init: float  # standard deviation of the initial weights
    adam: float  # learning rate of Adam and other optimizers with normalized updates
    sgd: float
    muon: float  # with whet's scaling of its updates to the size of Adam's


# Table 8 of the paper, in which logits are divided by the ratio. Embedding and head then follow the same
# rule, so they may be tied. A router has no such multiplier, so it follows the output weights of table 3.
# Muon is not in the paper. Its update has singular values of lr * 0.2 * sqrt(larger side), and a layer's
# output changes by the same amount at every width if they are sqrt(outputs / inputs) (arXiv 2310.17813). For
# a matrix that grows on both sides, the learning rate therefore scales with the ratio's power -1/2, and for
# a router with -1.
POWERS: dict[Role, Powers] = {
    "input": Powers(init=0, adam=0, sgd=1, muon=0),
    "hidden": Powers(init=-1 / 2, adam=-1, sgd=0, muon=-1 / 2),
    "output": Powers(init=0, adam=0, sgd=1, muon=0),
    "router": Powers(init=-1, adam=-1, sgd=-1, muon=-1),
}


def parameter_role(name: str, parameter: torch.Tensor) -> Role:
    """Return the role of a decoder's parameter in muP. Norm weights and biases count as input weights."""
    if name == "lm_head.weight":
        return "output"
    if name.endswith(".mlp.gate.weight"):
        return "router"
    return "input" if parameter.dim() == 1 or name.startswith("embed_") else "hidden"


def width_ratio(spec: ModelSpec, mup: MuP) -> float:
    """Return the width of a model divided by its base width."""
    return spec.d_model / mup.base_width


def with_mup_multipliers(spec: ModelSpec, mup: MuP) -> ModelSpec:
    """Return the spec with muP's factors on scores and logits. At the base width, nothing changes."""
    blocks = tuple(
        block
        if block.attention is None
        else dataclasses.replace(block, attention=_mup_attention(block, d_model=spec.d_model, mup=mup))
        for block in spec.blocks
    )
    return dataclasses.replace(spec, blocks=blocks, logit_scale=1 / width_ratio(spec, mup))


def _mup_attention(block: BlockSpec, *, d_model: int, mup: MuP) -> AttentionSpec:
    """Scale scores by 1 / head_dim instead of 1 / sqrt(head_dim), with equality at the base width."""
    attention = block.attention
    if not isinstance(attention, AttentionSpec):
        raise ConfigError(
            "optim.mup does not support latent attention", hint="choose another model.attention"
        )
    base, rest = divmod(attention.head_dim * mup.base_width, d_model)
    if mup.base_head_dim is not None:
        base = mup.base_head_dim
    elif rest:
        raise ConfigError(
            f"optim.mup.base_width={mup.base_width} is not a multiple of the number of heads "
            f"({attention.heads})",
            hint="choose another base width, or set its head size with optim.mup.base_head_dim",
        )
    scale = None if base == attention.head_dim else base**0.5 / attention.head_dim
    return dataclasses.replace(attention, scale=scale)


def check_mup_multipliers(spec: ModelSpec | None, mup: MuP, *, name: str) -> None:
    """Raise ConfigError unless a loaded model was built with this muP base. `spec` is None if not native."""
    if spec is None or with_mup_multipliers(spec, mup) != spec:
        raise ConfigError(
            f"{name} was not built with muP at optim.mup.base_width={mup.base_width}: its attention scores "
            "and logits are scaled differently",
            hint="remove optim.mup, or set the base width that the model was built with",
        )
