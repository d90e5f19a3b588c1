"""muP: the rate that suits a narrow model suits a wide one, too (Tensor Programs V, arXiv 2203.03466)."""

import dataclasses
from typing import Literal, NamedTuple

import torch

from whet.config.optim import MuP
from whet.errors import ConfigError
from whet.models.spec import AttentionSpec, BlockSpec, ModelSpec

Role = Literal["input", "hidden", "output", "router"]


class Powers(NamedTuple):
    """By which powers of the width ratio (width / base width) something is multiplied."""

    init: float  # the standard deviation of first weights
    adam: float  # the learning rate of Adam, and of all who make steps of one size a weight
    sgd: float
    muon: float  # with whet's scaling of its updates to the size that Adam's have


# Table 8 of the paper, in which logits are divided by the ratio: embedding and head have the same rule there,
# so they may be one matrix. A router has no such multiplier, so it follows the output weights of table 3.
# Muon is not in the paper. Its update has singular values of rate * 0.2 * sqrt(larger side), and a layer's
# output changes by as much at every width if they are sqrt(outputs / inputs) (arXiv 2310.17813): for a
# matrix that grows on both sides the rate takes the ratio's power -1/2, for a router -1.
POWERS: dict[Role, Powers] = {
    "input": Powers(init=0, adam=0, sgd=1, muon=0),
    "hidden": Powers(init=-1 / 2, adam=-1, sgd=0, muon=-1 / 2),
    "output": Powers(init=0, adam=0, sgd=1, muon=0),
    "router": Powers(init=-1, adam=-1, sgd=-1, muon=-1),
}


def role_of(name: str, parameter: torch.Tensor) -> Role:
    """What a decoder's parameter is to the table; gains of norms and biases are input weights there."""
    if name == "lm_head.weight":
        return "output"
    if name.endswith(".mlp.gate.weight"):
        return "router"
    return "input" if parameter.dim() == 1 or name.startswith("embed_") else "hidden"


def width_ratio(spec: ModelSpec, mup: MuP) -> float:
    """How many times as wide as its base a model is."""
    return spec.d_model / mup.base_width


def with_multipliers(spec: ModelSpec, mup: MuP) -> ModelSpec:
    """The decoder with muP's factors on scores and logits; at the base width it is the decoder as it was."""
    blocks = tuple(
        block
        if block.attention is None
        else dataclasses.replace(block, attention=_with_scale(block, d_model=spec.d_model, mup=mup))
        for block in spec.blocks
    )
    return dataclasses.replace(spec, blocks=blocks, logit_scale=1 / width_ratio(spec, mup))


def _with_scale(block: BlockSpec, *, d_model: int, mup: MuP) -> AttentionSpec:
    """Scores divided by the size of a head instead of its square root, and as they were at the base width."""
    attention = block.attention
    if not isinstance(attention, AttentionSpec):
        raise ConfigError("optim.mup does not know latent attention", hint="choose another model.attention")
    base, rest = divmod(attention.head_dim * mup.base_width, d_model)
    if mup.base_head_dim is not None:
        base = mup.base_head_dim
    elif rest:
        raise ConfigError(
            f"optim.mup.base_width={mup.base_width} is not a multiple of the {attention.heads} heads",
            hint="choose another width, or say how large a head is there: optim.mup.base_head_dim",
        )
    scale = None if base == attention.head_dim else base**0.5 / attention.head_dim
    return dataclasses.replace(attention, scale=scale)


def refuse_other_multipliers(spec: ModelSpec | None, mup: MuP, *, name: str) -> None:
    """A model that is loaded must have been made with this base; None: one that is not whet's own."""
    if spec is None or with_multipliers(spec, mup) != spec:
        raise ConfigError(
            f"{name} was not made with muP at optim.mup.base_width={mup.base_width}: its scores and logits "
            "are scaled otherwise",
            hint="leave optim.mup out, or give the base it was made with",
        )
