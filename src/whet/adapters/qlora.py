"""A base model in 4 bits, to train adapters on."""

import logging

import torch
from torch import nn

from whet.adapters.adapter import replace_module
from whet.adapters.nf4 import NF4Linear, bitsandbytes
from whet.adapters.targets import linear_layers
from whet.errors import ModelError
from whet.models.language_model import LanguageModel
from whet.ops.dispatch import using

log = logging.getLogger("whet")


def quantise_base(model: LanguageModel, *, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Put every linear layer but the head into 4 bits, in place, to be computed with in `dtype`.

    Layer by layer, on the device: the whole weights never have to fit there. The rest of the model follows.
    """
    layers = linear_layers(model)
    if not layers:
        raise ModelError(
            "this model has no linear layer that could be put into 4 bits", hint="use kind: lora"
        )
    for name in layers:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with using(model.paths):
            replace_module(model, name, NF4Linear(linear, device=device, dtype=dtype))
    model.to(device, dtype)
    count, size = quantised_weights(model)
    how = "bitsandbytes" if bitsandbytes() is not None else "torch (bitsandbytes is not installed)"
    how = how if model.paths.quantised else "torch"
    log.info("base: %s weights in NF4, %.3f bytes each, by %s", f"{count:,}", size / count, how)
    return model


def quantised_weights(model: nn.Module) -> tuple[int, int]:
    """How many weights are in 4 bits, and the bytes that all that stands for them takes."""
    layers = [module for module in model.modules() if isinstance(module, NF4Linear)]
    size = sum(b.numel() * b.element_size() for layer in layers for b in layer.buffers())
    return sum(layer.in_features * layer.out_features for layer in layers), size
