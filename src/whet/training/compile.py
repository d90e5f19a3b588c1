"""torch.compile for each layer of a model, with a fallback to eager mode."""

import time

import torch

from whet.data.batches import Batch
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.training.loss import autocast_context
from whet.training.prefetch import forward_rng_state, restore_forward_rng_state

_MIN_RECOMPILE_LIMIT = 64


def compile_blocks(model: LanguageModel, batch: Batch, precision: Precision) -> str:
    """Compile each layer in place, run a first micro-batch, and return the outcome as text.

    The micro-batch has typical sizes, so the first step does not compile again. A failure undoes the
    compilation, and the text gives the reason.

    Args:
        model: The model whose layers are compiled.
        batch: A micro-batch like those of the run.
        precision: The precision of the run.
    """
    if not model.paths.compile:
        return "off: the reference path uses plain torch"
    start, blocks = time.perf_counter(), list(model.blocks())
    # recompute cheap operations in the backward pass: uses a quarter less memory
    torch._functorch.config.ban_recompute_materialized_backward = False
    # the graphs contain custom autograd functions of adapters: cache them for the next run
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # all layers share one function, which needs a graph for each kind of layer and of batch
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MIN_RECOMPILE_LIMIT)
    # a layer's floats, such as an adapter's scale, are constants, not inputs of its graph
    torch._dynamo.config.specialize_float = True
    # If its input requires a gradient, as in the other layers, the first layer shares their graph. That
    # gradient costs 0.1 to 0.2% of a step. Frozen layers need none.
    model.input_requires_grad = any(parameter.requires_grad for parameter in blocks[0].parameters())
    rng_state, training = forward_rng_state(model.device), model.training
    try:
        for block in blocks:
            block.compile(dynamic=True)
        _run_once(model.train(), batch.to(model.device), precision)
    except Exception as error:  # a run must work whatever fails in a compiler backend
        for block in blocks:
            block._compiled_call_impl = None
        model.input_requires_grad = False
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"off: {reason}"
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
        restore_forward_rng_state(model.device, rng_state)
    return f"on, for {len(blocks)} layers, in {time.perf_counter() - start:.1f} s"


def _run_once(model: LanguageModel, batch: Batch, precision: Precision) -> None:
    """Run a forward and a backward pass."""
    with autocast_context(precision, model.device):
        hidden = model.hidden(batch.tokens, batch.positions, batch.layout())
    hidden.float().sum().backward()
