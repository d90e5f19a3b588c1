"""How far a student's predictions are from a teacher's, in chunks: neither side's full logits ever exist."""

from typing import Any, Literal

import torch
import torch.nn.functional as F

from whet.ops.head import Head
from whet.ops.head_gradients import HeadGradients
from whet.ops.linear_cross_entropy import chunk_rows
from whet.ops.softmax_rows import widened

Divergence = Literal["forward", "reverse", "jsd"]


def linear_kl(
    hidden: torch.Tensor,
    head: Head,
    teacher_hidden: torch.Tensor,
    teacher_head: Head,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
) -> torch.Tensor:
    """The SUM over positions of the divergence of softmax(logits / temperature), in float32 or wider.

    forward: KL(teacher || student); reverse: KL(student || teacher); jsd: the mean of both to their middle.
    The gradient, to the student only, is computed with the loss: logits are made once and dropped.
    """
    if not hidden.shape[0]:
        return hidden.float().sum()
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled():
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearKL.apply(
        hidden, weight, bias, head, teacher_hidden.detach(), teacher_head, temperature, divergence
    )
    return loss


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        teacher_hidden: torch.Tensor,
        teacher_head: Head,
        temperature: float,
        divergence: Divergence,
    ) -> torch.Tensor:
        student = Head(weight.to(hidden.dtype), bias, head.scale, head.softcap)
        teacher = Head(
            teacher_head.weight.detach().to(teacher_hidden.dtype),
            None if teacher_head.bias is None else teacher_head.bias.detach(),
            teacher_head.scale,
            teacher_head.softcap,
        )
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        rows = max(1, chunk_rows(weight) // 2)  # two sides at once
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                span = slice(start, start + rows)
                logits = widened(F.linear(hidden[span], student.weight), student)
                wanted = widened(F.linear(teacher_hidden[span], teacher.weight), teacher).to(wide)
                loss, grad = divergence_of(
                    logits / temperature,
                    wanted / temperature,
                    divergence,
                    want_grad=any(ctx.needs_input_grad),
                )
                total += loss.sum()
                if grad is None:
                    continue
                grad = grad.mul_(student.scale / temperature)
                if student.softcap is not None:
                    grad *= 1 - (logits / student.softcap).square_()
                gradients.add(span, grad, hidden[span], student)
        ctx.save_for_backward(*gradients.tensors())
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        grads = [
            None if grad is None else (grad * upstream).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None)


def divergence_of(
    student: torch.Tensor, teacher: torch.Tensor, kind: Divergence, *, want_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The divergence of each row of logits [rows, V], and its gradient at the student's."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    q = log_q.exp()
    if kind == "forward":
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), q - p if want_grad else None
    other = log_p if kind == "reverse" else torch.logaddexp(log_p, log_q) - torch.log(log_q.new_tensor(2.0))
    gap = log_q - other
    towards = (q * gap).sum(-1)
    if kind == "reverse":
        return towards, q * (gap - towards[:, None]) if want_grad else None
    loss = 0.5 * towards + 0.5 * (log_p.exp() * (log_p - other)).sum(-1)
    return loss, 0.5 * q * (gap - towards[:, None]) if want_grad else None
