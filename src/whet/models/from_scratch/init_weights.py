"""The first weights of a decoder that is trained from scratch."""

import math

import torch
from torch import nn

from whet.models.decoder import Decoder
from whet.models.from_scratch.mup import POWERS, role_of
from whet.models.spec import ModelSpec

STD = 0.02
POSITION_STD = 0.01
RESIDUAL = ("o_proj", "down_proj")


def from_scratch(
    spec: ModelSpec,
    *,
    seed: int,
    source_config: dict[str, object] | None = None,
    width_ratio: float = 1.0,
) -> Decoder:
    """A decoder with fresh float32 weights on the CPU: equal for equal seeds, whatever the device."""
    # said even when there are none: transformers' defaults name tokens of the family's own vocabulary
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with torch.device("meta"):
        model = Decoder(spec, source_config={**special, **(source_config or {})})
    model.to_empty(device="cpu")
    initialise(model, torch.Generator().manual_seed(seed), width_ratio=width_ratio)
    return model


@torch.no_grad()
def initialise(model: Decoder, generator: torch.Generator, *, width_ratio: float = 1.0) -> None:
    """GPT-2's rule, which the papers of most families here share or do not contradict.

    Weights are drawn from N(0, 0.02), learned positions from N(0, 0.01). What is added to the residual stream
    is divided by the square root of how many such layers there are, so that the stream's variance does not
    grow with depth. Biases are 0, norms are the identity. Experts are drawn as the layers they stand for.
    Under muP this is what the base is drawn from, and a model `width_ratio` times as wide by muP's table.
    """
    residual_layers = sum(
        (block.attention is not None) + (block.feedforward is not None) for block in model.spec.blocks
    )
    for buffer in model.buffers():
        buffer.zero_()  # those of the balance of experts
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if leaf == "bias":
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(0.0 if model.spec.norm.offset else 1.0)
        else:
            std = POSITION_STD if module == "embed_positions" else STD
            if name.removesuffix(".weight").endswith(RESIDUAL):
                std /= math.sqrt(residual_layers)
            std *= width_ratio ** POWERS[role_of(name, parameter)].init
            nn.init.normal_(parameter, std=std, generator=generator)
