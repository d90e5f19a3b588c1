"""How a model is run for a while: to be looked at, or with its layers as they are."""

import contextlib
from collections.abc import Iterator

import torch

from whet.models.language_model import LanguageModel


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, for the time of a `with` block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if callable(reshard := getattr(model, "reshard", None)):
            reshard()  # what FSDP keeps gathered after a forward pass would be out of date one update later


@contextlib.contextmanager
def uncompiled(model: LanguageModel) -> Iterator[None]:
    """Run compiled layers as they are: the changing shapes of decoding would use up their recompilations."""
    if not any(getattr(block, "_compiled_call_impl", None) for block in model.blocks()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
