"""QLoRA: quantize the linear layers of a base model to 4 bits before adapters are attached."""

import logging

import torch
from torch import nn

from whet.adapters.adapter import replace_module
from whet.adapters.nf4 import NF4Linear, bitsandbytes_functional, quantized_size
from whet.adapters.targets import linear_layers
from whet.errors import ModelError
from whet.models.language_model import LanguageModel
from whet.ops.dispatch import use_paths

log = logging.getLogger("whet")


def quantize_base(model: LanguageModel, *, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Quantize every linear layer except the head to NF4, in place, with `dtype` as the compute dtype.

    Layers are moved to the device and quantized one by one, so the unquantized weights never have to fit
    there at once. The other parameters of the model are moved last.
    """
    layers = linear_layers(model)
    if not layers:
        raise ModelError(
            "this model has no linear layer that can be quantized to 4 bits", hint="set method.kind=lora"
        )
    for name in layers:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with use_paths(model.paths):
            replace_module(model, name, NF4Linear(linear, device=device, dtype=dtype))
    model.to(device, dtype)
    count, size = quantized_size(model)
    backend = (
        "bitsandbytes" if bitsandbytes_functional() is not None else "torch (bitsandbytes is not installed)"
    )
    backend = backend if model.paths.quantized else "torch"
    log.info(
        "base model: %s weights in NF4, %.3f bytes per weight, dequantized by %s",
        f"{count:,}",
        size / count,
        backend,
    )
    return model
