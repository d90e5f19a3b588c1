"""Looking at a run without leaving a trace in it."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from whet.models.language_model import LanguageModel, uncompiled
from whet.models.transformers_bridge import Bridge


@contextlib.contextmanager
def preserve_state(learner: nn.Module, model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a `with` block, after which every random stream and every mode is as it was.

    Compiled layers run as they are: new shapes and modes would use up their recompilations. Gradients must be
    asked for with `torch.autograd.grad`, which leaves `.grad` alone.
    """
    modes = [(module, module.training) for module in learner.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    device = next(model.parameters()).device
    with contextlib.ExitStack() as held:
        held.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        held.callback(random.setstate, python)
        held.callback(np.random.set_state, numpy)
        held.callback(_set_modes, modes)
        # transformers recomputes activations in training mode only, and without that they may not fit
        learner.train(isinstance(model, Bridge) and model.grad_checkpoint)
        if isinstance(model, LanguageModel):
            held.enter_context(uncompiled(model))
        yield


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
