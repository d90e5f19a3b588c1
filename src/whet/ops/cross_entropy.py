"""Cross-entropy from hidden states and the output head, in chunks.

The full logits [tokens, V] are never materialized.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from whet.ops.dispatch import device_type, is_planning
from whet.ops.lm_head import Head, HeadGradients, full_logits, head_operands, zero_loss
from whet.ops.log_softmax import token_losses

# maximum (rows, logits) of a chunk: large enough for efficient matmuls
_MAX_CHUNK = {"cpu": (1024, 2**26), "cuda": (8192, 2**28)}
_TRAINED_ROWS_PER_COLUMN = 2  # a chunk of a trained head has at least this many rows per column of its weight
_ALIGNMENT = 128  # rows of a matmul tile


def chunk_rows(weight: torch.Tensor, *, trained: bool = False) -> int:
    """Return how many positions are projected at once by a head's weight [V, D].

    On a GPU the gradient of a trained head is read and written once per chunk. With more rows than D, this
    costs little compared with the matmuls, and the logits of a chunk are smaller than the weight together
    with its gradient and optimizer state.
    """
    kind = device_type(weight)
    max_rows, max_logits = _MAX_CHUNK.get(kind, _MAX_CHUNK["cpu"])
    rows = min(max_rows, max_logits // weight.shape[0])
    if trained and kind == "cuda":
        rows = max(rows, min(max_rows, _TRAINED_ROWS_PER_COLUMN * weight.shape[1]))
    return max(1, rows - rows % _ALIGNMENT if rows > _ALIGNMENT else rows)


def spans(count: int, rows: int) -> Iterator[slice]:
    """Split `count` rows into chunks of about equal size, at most `rows` each.

    Memory planning yields only two chunks, because all of them need the same memory.
    """
    if rows < count:
        even_rows = -(-count // -(-count // rows))
        rows = min(rows, even_rows + -even_rows % _ALIGNMENT if rows > _ALIGNMENT else even_rows)
    end = min(count, 2 * rows) if is_planning() else count
    return (slice(start, start + rows) for start in range(0, end, rows))


def linear_cross_entropy(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, *, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over positions of weight * -log p(target), in float32 or wider.

    The gradient is computed together with the loss, chunk by chunk, so the logits are computed only once.

    Args:
        hidden: Hidden states [N, D] at the supervised positions.
        head: The output head.
        targets: Target token ids [N].
        weights: Optional weights [N] of the positions.
    """
    if not hidden.shape[0]:
        return zero_loss(hidden, head)
    if not head.paths.losses:
        losses = F.cross_entropy(full_logits(hidden, head), targets, reduction="none")
        return losses.sum() if weights is None else (losses * weights).sum()
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        *head_operands(hidden, head), targets, weights, head.scale, head.softcap
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
        needs_grad = ctx.needs_input_grad[:3]
        head = Head(weight.to(hidden.dtype), bias, scale, softcap)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        gradients = HeadGradients(hidden, weight, bias, needs_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], chunk_rows(weight, trained=needs_grad[1])):
                x = hidden[span]
                token_weights = None if weights is None else weights[span].to(wide)
                losses, grad = token_losses(
                    F.linear(x, head.weight),
                    targets[span],
                    head,
                    token_weights=token_weights,
                    with_gradient=any(needs_grad),
                )
                total += losses.sum() if token_weights is None else torch.dot(losses, token_weights)
                if grad is not None:
                    gradients.add(span, grad, x, head)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            # a sum that is not yet divided may overflow float16
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
