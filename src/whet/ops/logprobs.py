"""Log-probabilities of given tokens from hidden states and the head, in chunks."""

from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.cross_entropy import chunk_rows, spans
from whet.ops.lm_head import Head, HeadGradients, full_logits, operands
from whet.ops.log_softmax import row_losses


def token_logprobs(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """log p(target) at each position [N], in float32 or wider, with a gradient for any use of them.

    `hidden` is [N, D], `targets` [N]. What is done with the numbers is not known yet, so logits are made
    again, chunk by chunk, in the backward pass: the full [N, V] never exists.
    """
    if not head.paths.losses:
        return full_logits(hidden, head).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found: torch.Tensor = _TokenLogprobs.apply(*operands(hidden, head), targets, head.scale, head.softcap)
    return found


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
        found = hidden.new_empty(hidden.shape[0], dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], chunk_rows(weight)):
                losses, _ = row_losses(
                    F.linear(hidden[span], head.weight), targets[span], head, want_gradient=False
                )
                found[span] = -losses
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scale, ctx.softcap = scale, softcap
        return found

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        hidden, weight, bias, targets = ctx.saved_tensors
        head = Head(weight.to(hidden.dtype), bias, ctx.scale, ctx.softcap)
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], chunk_rows(weight)):
                _, grad = row_losses(
                    F.linear(hidden[span], head.weight), targets[span], head, row_weight=-upstream[span]
                )
                assert grad is not None
                gradients.add(span, grad, hidden[span], head)
        inputs = (hidden, weight, bias)
        grads = [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(gradients.tensors(), inputs, strict=True)
        ]
        return (*grads, None, None, None)
