"""torch.compile, layer by layer, with a way back."""

import time

import torch

from whet.data.batches import Batch
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.training.loss import in_precision
from whet.training.prefetch import device_random, restore_device_random

_MOST_GRAPHS = 64


def compile_blocks(model: LanguageModel, batch: Batch, precision: Precision) -> str:
    """Compile each layer in place and try it on a first micro-batch; where that fails, undo it, say why.

    So the first step finds everything compiled, and compiled for sizes like its own.
    """
    if not model.paths.compile:
        return "off: the reference path is plain torch"
    began, blocks = time.perf_counter(), list(model.blocks())
    # what is cheap to compute again is not kept for the backward pass: a quarter less memory
    torch._functorch.config.ban_recompute_materialized_backward = False
    # the custom gradients of products with adapters are in the graph: a second run may find it compiled
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # layers of all kinds share one function, and each kind of them, and of batches, is a graph of its own
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    # a layer's numbers, such as an adapter's scale, never change: they are no inputs of its graph
    torch._dynamo.config.specialize_float = True
    # with an input like that of the others, the first layer shares their graph; its gradient costs
    # one or two thousandths of a step, and nothing flows into layers that do not train
    model.input_has_gradient = any(parameter.requires_grad for parameter in blocks[0].parameters())
    random, training = device_random(model.device), model.training
    try:
        for block in blocks:
            block.compile(dynamic=True)
        _try(model.train(), batch.to(model.device), precision)
    except Exception as error:  # any failure of a compiler backend must leave a working run
        for block in blocks:
            block._compiled_call_impl = None
        model.input_has_gradient = False
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"off: {reason}"
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
        restore_device_random(model.device, random)
    return f"on, for {len(blocks)} layers, in {time.perf_counter() - began:.1f} s"


def _try(model: LanguageModel, batch: Batch, precision: Precision) -> None:
    """A forward and a backward pass."""
    with in_precision(precision, model.device):
        hidden = model.hidden(batch.tokens, batch.positions, batch.layout())
    hidden.float().sum().backward()
