"""torch.compile, layer by layer, with a way back."""

import torch

from whet.models.language_model import LanguageModel


def compile_blocks(model: LanguageModel) -> str:
    """Compile each layer in place and try it once; where that fails, undo it and say why."""
    blocks = list(model.blocks())
    # what is cheap to compute again is not kept for the backward pass: a third less memory
    torch._functorch.config.ban_recompute_materialized_backward = False
    # the custom gradients of products with adapters are in the graph: a second run may find it compiled
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    try:
        for block in blocks:
            block.compile(dynamic=True)
        tokens = torch.arange(8, device=model.device)[None] % model.vocab_size
        model.hidden(tokens).float().sum().backward()
    except Exception as error:  # any failure of a compiler backend must leave a working run
        for block in blocks:
            block._compiled_call_impl = None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"off: {reason}"
    finally:
        model.zero_grad(set_to_none=True)
    return f"on, for {len(blocks)} layers"
