"""-log softmax of one target a row, and its gradient, for one chunk of logits."""

import torch

from whet.ops.dispatch import device_type, is_plan, kernels_work
from whet.ops.lm_head import Head


def row_losses(
    projected: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    row_weight: torch.Tensor | None = None,
    want_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-log p(target) of each row [N], and the gradient [N, V] of row_weight * loss at `projected`.

    `projected` is hidden @ weight.T, before bias, scale and cap; it is overwritten. Sums are in float32 or
    wider. On a GPU one kernel reads the logits twice and writes them once.
    """
    if is_plan() and device_type(projected) == "cuda":
        return projected.new_empty(len(targets), dtype=torch.float32), projected if want_gradient else None
    if projected.is_cuda and projected.dtype != torch.float64 and kernels_work():
        from whet.ops.kernels.log_softmax_triton import row_losses_on_gpu

        return row_losses_on_gpu(projected, targets, head, row_weight=row_weight, want_gradient=want_gradient)
    logits = widened(projected, head)
    chosen = logits.gather(1, targets[:, None])
    if not want_gradient:
        return (torch.logsumexp(logits, dim=-1, keepdim=True) - chosen)[:, 0], None
    slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
    largest = logits.amax(-1, keepdim=True)
    grad = torch.softmax(logits, dim=-1, out=logits)  # a second copy would cost more time than the softmax
    # p(largest) is at least 1 / V, so its logarithm is exact where that of p(target) may not be
    losses = (largest - grad.amax(-1, keepdim=True).log() - chosen)[:, 0]
    grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
    if row_weight is not None:
        grad *= row_weight[:, None]
    if slope is not None:
        grad *= slope
    return losses, grad if head.scale == 1.0 else grad.mul_(head.scale)


def widened(projected: torch.Tensor, head: Head) -> torch.Tensor:
    """Logits in float32 or wider, transformed in place where that is what they were."""
    logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1.0:
        logits *= head.scale
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)
