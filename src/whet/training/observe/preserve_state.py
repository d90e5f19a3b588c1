"""Run a model during training without changing the state of the run."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from whet.models.language_model import LanguageModel, eager_layers
from whet.models.transformers_bridge import Bridge


@contextlib.contextmanager
def preserve_state(trained_module: nn.Module, model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode for a `with` block, then restore the modes and all random states.

    Compiled layers run uncompiled, because new shapes and modes would count against their recompile limit.
    Gradients must be computed with `torch.autograd.grad`, which does not change `.grad`.
    """
    modes = [(module, module.training) for module in trained_module.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    device = next(model.parameters()).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.callback(random.setstate, python)
        stack.callback(np.random.set_state, numpy)
        stack.callback(_set_modes, modes)
        # transformers uses activation checkpointing in training mode only; without it, memory may not suffice
        trained_module.train(isinstance(model, Bridge) and model.grad_checkpoint)
        if isinstance(model, LanguageModel):
            stack.enter_context(eager_layers(model))
        yield


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
