"""Merge adapters into the weights of their base model."""

import torch

from whet.adapters.adapter import named_adapters, replace_module
from whet.adapters.nf4 import NF4Linear
from whet.models.language_model import LanguageModel


def merge(model: LanguageModel) -> LanguageModel:
    """Merge every adapter into its base weight and remove it, in place.

    Quantized layers become plain linear layers. `model.name` is cleared, because the result is no longer the
    model that was loaded.
    """
    with torch.no_grad():
        for name, module in list(named_adapters(model)):
            replace_module(model, name, module.merged_module())
            model.name = None
        for name, layer in list(model.named_modules()):
            if isinstance(layer, NF4Linear):
                replace_module(model, name, layer.to_linear())
                model.name = None
    return model
