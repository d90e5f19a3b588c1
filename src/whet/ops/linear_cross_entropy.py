"""Cross-entropy from hidden states and the head, in chunks: the full [tokens, V] logits never exist."""

from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.head import Head
from whet.ops.head_gradients import HeadGradients

# rows a chunk: enough to keep the matrix product efficient, at most 64 Mi logits at once
_MAX_CHUNK = 1024
_MAX_LOGITS = 64 * 2**20


def chunk_rows(vocab_size: int) -> int:
    """How many positions are projected at once for a vocabulary."""
    return max(1, min(_MAX_CHUNK, _MAX_LOGITS // vocab_size))


def linear_cross_entropy(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, *, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The SUM over positions of weight * -log p(target), in float32 or wider.

    `hidden` is [N, D] and `targets` [N]: the supervised positions only. The gradient is computed with the
    loss, chunk by chunk, so logits are made once and dropped.
    """
    if not hidden.shape[0]:
        return hidden.float().sum()  # zero, and still attached to the graph
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled():  # autograd would still ask for the gradient of a trained head
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden, weight, bias, targets, weights, head.scale, head.softcap
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:3]
        head = Head(weight.to(hidden.dtype), bias, scale, softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        gradients = HeadGradients(hidden, weight, bias, wanted)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], rows := chunk_rows(weight.shape[0])):
                span = slice(start, start + rows)
                x, target = hidden[span], targets[span, None]
                row_weight = None if weights is None else weights[span].to(wide)
                logits = project(x, head)
                log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
                loss = (log_total - logits.gather(1, target))[:, 0]
                total += loss.sum() if row_weight is None else torch.dot(loss, row_weight)
                if any(wanted):
                    grad = projection_gradient(logits, log_total, target, row_weight, head)
                    gradients.add(span, grad, x, head)
        ctx.save_for_backward(*gradients.tensors())
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        grads = [
            None if grad is None else (grad * upstream).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def project(x: torch.Tensor, head: Head) -> torch.Tensor:
    """Wide logits of one chunk, transformed in place."""
    logits = F.linear(x, head.weight).to(torch.promote_types(x.dtype, torch.float32))
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1.0:
        logits *= head.scale
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)


def projection_gradient(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor | None,
    head: Head,
) -> torch.Tensor:
    """The gradient at hidden @ weight.T + bias, which overwrites the logits."""
    slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
    grad = logits.sub_(log_total).exp_()  # the softmax
    grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
    if row_weight is not None:
        grad *= row_weight[:, None]
    if slope is not None:
        grad *= slope
    return grad if head.scale == 1.0 else grad.mul_(head.scale)
