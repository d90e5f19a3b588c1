"""Cross-entropy from hidden states and the head, in chunks: the full [tokens, V] logits never exist."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.dispatch import device_type, is_plan
from whet.ops.lm_head import Head, HeadGradients, full_logits, nothing, operands
from whet.ops.log_softmax import row_losses

# (rows, logits) a chunk has at most: enough to keep the matrix products efficient
_MOST = {"cpu": (1024, 2**26), "cuda": (8192, 2**28)}
_ROWS_OF_TRAINED = 2  # for each column of a trained head's weight
_ALIGNED = 128  # rows of the tiles of a matrix product


def chunk_rows(weight: torch.Tensor, *, trained: bool = False) -> int:
    """How many positions are projected at once by a head's weight [V, D].

    On a GPU the gradient of a trained head is read and written once a chunk. With more rows than D that is
    little beside the products, and the logits are smaller than the weight with its gradient and moments.
    """
    kind = device_type(weight)
    most_rows, most_logits = _MOST.get(kind, _MOST["cpu"])
    rows = min(most_rows, most_logits // weight.shape[0])
    if trained and kind == "cuda":
        rows = max(rows, min(most_rows, _ROWS_OF_TRAINED * weight.shape[1]))
    return max(1, rows - rows % _ALIGNED if rows > _ALIGNED else rows)


def spans(count: int, rows: int) -> Iterator[slice]:
    """Chunks of about one size, at most so many rows; in a plan two, since all take the same memory."""
    if rows < count:
        even = -(-count // -(-count // rows))
        rows = min(rows, even + -even % _ALIGNED if rows > _ALIGNED else even)
    end = min(count, 2 * rows) if is_plan() else count
    return (slice(start, start + rows) for start in range(0, end, rows))


def linear_cross_entropy(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, *, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The SUM over positions of weight * -log p(target), in float32 or wider.

    `hidden` is [N, D] and `targets` [N]: the supervised positions only. The gradient is computed with the
    loss, chunk by chunk, so logits are made once and dropped.
    """
    if not hidden.shape[0]:
        return nothing(hidden, head)
    if not head.paths.losses:
        losses = F.cross_entropy(full_logits(hidden, head), targets, reduction="none")
        return losses.sum() if weights is None else (losses * weights).sum()
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        *operands(hidden, head), targets, weights, head.scale, head.softcap
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
            for span in spans(hidden.shape[0], chunk_rows(weight, trained=wanted[1])):
                x = hidden[span]
                row_weight = None if weights is None else weights[span].to(wide)
                losses, grad = row_losses(
                    F.linear(x, head.weight),
                    targets[span],
                    head,
                    row_weight=row_weight,
                    want_gradient=any(wanted),
                )
                total += losses.sum() if row_weight is None else torch.dot(losses, row_weight)
                if grad is not None:
                    gradients.add(span, grad, x, head)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            # a sum that is not divided yet may be too large for float16
            *(
                grad if grad is None or dtype == torch.float16 else grad.to(dtype)
                for grad, dtype in zip(gradients.tensors(), ctx.dtypes, strict=True)
            )
        )
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        grads = [
            None if grad is None else (grad * upstream).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)
