"""`run.fp8`: which of a model's products are taken in 8 bits."""

import torch

from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.ops.fp8 import MULTIPLE
from whet.ops.linear import Linear


def use_fp8(model: LanguageModel, method: str, *, device: torch.device | None = None) -> str:
    """Let the linear layers of all blocks multiply in 8 bits while they train; says how many do."""
    device = device or model.device
    if method != "full":
        raise ConfigError(
            "run.fp8 is for training every weight", hint="set method.kind to full, or run.fp8 to false"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"run.fp8: {name} cannot multiply in 8 bits", hint="set run.fp8 to false")
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"run.fp8 does not run on {device.type}", hint="set run.fp8 to false")
    found = [module for block in model.blocks() for module in block.modules() if type(module) is Linear]
    fitting = [
        layer for layer in found if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    ]
    if not fitting:
        raise ConfigError(
            f"run.fp8: no linear layer of this model has sides that are multiples of {MULTIPLE}",
            hint="only whet's own architectures have such layers; set run.fp8 to false",
        )
    for layer in fitting:
        layer.fp8 = True
    slow = " (on a CPU only to try it out)" if device.type == "cpu" else ""
    return f"{len(fitting)} of {len(found)} linear layers multiply in 8 bits while training{slow}"
