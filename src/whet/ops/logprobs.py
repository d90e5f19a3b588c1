"""Log-probabilities of given tokens, computed in chunks from hidden states and the output head."""

from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.cross_entropy import chunk_rows, spans
from whet.ops.lm_head import Head, HeadGradients, full_logits, head_operands
from whet.ops.log_softmax import token_losses


def token_logprobs(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Return log p(target) at each position [N], in float32 or wider.

    The result is differentiable. The backward pass recomputes the logits chunk by chunk, because the upstream
    gradient is unknown in the forward pass. The full logits [N, V] are never materialized.

    Args:
        hidden: Hidden states [N, D].
        head: The output head.
        targets: Target token ids [N].
    """
    if not head.paths.losses:
        return full_logits(hidden, head).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprobs: torch.Tensor = _TokenLogprobs.apply(
        *head_operands(hidden, head), targets, head.scale, head.softcap
    )
    return logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        head = Head(weight.to(hidden.dtype), bias, scale, softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], chunk_rows(weight)):
                losses, _ = token_losses(
                    F.linear(hidden[span], head.weight), targets[span], head, with_gradient=False
                )
                logprobs[span] = -losses
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scale, ctx.softcap = scale, softcap
        return logprobs

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        hidden, weight, bias, targets = ctx.saved_tensors
        head = Head(weight.to(hidden.dtype), bias, ctx.scale, ctx.softcap)
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], chunk_rows(weight)):
                _, grad = token_losses(
                    F.linear(hidden[span], head.weight), targets[span], head, token_weights=-upstream[span]
                )
                assert grad is not None
                gradients.add(span, grad, hidden[span], head)
        inputs = (hidden, weight, bias)
        grads = [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(gradients.tensors(), inputs, strict=True)
        ]
        return (*grads, None, None, None)
