"""Weight initialization of decoders trained from scratch."""

import math

import torch
from torch import nn

from whet.models.decoder import Decoder
from whet.models.from_scratch.mup import POWERS, parameter_role
from whet.models.spec import ModelSpec

STD = 0.02
POSITION_STD = 0.01
RESIDUAL = ("o_proj", "down_proj")


def new_decoder(
    spec: ModelSpec,
    *,
    seed: int,
    source_config: dict[str, object] | None = None,
    width_ratio: float = 1.0,
) -> Decoder:
    """Return a decoder with newly initialized float32 weights on the CPU, equal for equal seeds."""
    # explicit None values: the defaults of transformers refer to tokens of the original vocabulary
    special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with torch.device("meta"):
        model = Decoder(spec, source_config={**special_tokens, **(source_config or {})})
    model.to_empty(device="cpu")
    initialize_weights(model, torch.Generator().manual_seed(seed), width_ratio=width_ratio)
    return model


@torch.no_grad()
def initialize_weights(model: Decoder, generator: torch.Generator, *, width_ratio: float = 1.0) -> None:
    """Initialize by GPT-2's rule, which is consistent with the papers of most families.

    Weights are drawn from N(0, 0.02), learned positions from N(0, 0.01). The standard deviation of residual
    projections is divided by the square root of their number, so the variance of the residual stream does not
    grow with depth. Biases are 0, and norms are the identity. Experts are drawn like dense layers. With muP,
    this initializes a model of the base width, and muP's table scales it for one `width_ratio` times as wide.
    """
    residual_layers = sum(
        (block.attention is not None) + (block.feedforward is not None) for block in model.spec.blocks
    )
    for buffer in model.buffers():
        buffer.zero_()  # the balance biases of experts
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
            std *= width_ratio ** POWERS[parameter_role(name, parameter)].init
            nn.init.normal_(parameter, std=std, generator=generator)
