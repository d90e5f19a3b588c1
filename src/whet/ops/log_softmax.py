"""The negative log-likelihood of one target per row, and its gradient, for a chunk of logits."""

import torch

from whet.ops.dispatch import can_build_kernels, device_type, is_planning
from whet.ops.lm_head import Head


def token_losses(
    projected: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    token_weights: torch.Tensor | None = None,
    with_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return -log p(target) of each row [N], and the gradient [N, V] of its weighted sum at `projected`.

    `projected` is hidden @ weight.T, before bias, scale and softcap. It is overwritten. Sums are in float32
    or wider. On a GPU, one kernel reads the logits twice and writes them once.
    """
    if is_planning() and device_type(projected) == "cuda":
        return projected.new_empty(len(targets), dtype=torch.float32), projected if with_gradient else None
    if projected.is_cuda and projected.dtype != torch.float64 and can_build_kernels():
        from whet.ops.kernels.log_softmax_triton import token_losses_on_gpu

        return token_losses_on_gpu(
            projected, targets, head, token_weights=token_weights, with_gradient=with_gradient
        )
    logits = to_wide_logits(projected, head)
    target_logits = logits.gather(1, targets[:, None])
    if not with_gradient:
        return (torch.logsumexp(logits, dim=-1, keepdim=True) - target_logits)[:, 0], None
    slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
    largest = logits.amax(-1, keepdim=True)
    # in place, because a second copy would cost more time than the softmax
    grad = torch.softmax(logits, dim=-1, out=logits)
    # p(largest) is at least 1 / V, so its logarithm is accurate even if p(target) underflows
    losses = (largest - grad.amax(-1, keepdim=True).log() - target_logits)[:, 0]
    grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
    if token_weights is not None:
        grad *= token_weights[:, None]
    if slope is not None:
        grad *= slope
    return losses, grad if head.scale == 1.0 else grad.mul_(head.scale)


def to_wide_logits(projected: torch.Tensor, head: Head) -> torch.Tensor:
    """Return logits in float32 or wider, with bias, scale and softcap applied.

    `projected` is overwritten if it already has the wide dtype.
    """
    logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1.0:
        logits *= head.scale
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)
