"""How far a student's predictions are from a teacher's, in chunks: neither side's full logits ever exist."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from whet.ops.cross_entropy import chunk_rows, spans
from whet.ops.lm_head import Head, HeadGradients, full_logits, nothing, operands
from whet.ops.log_softmax import widened

Divergence = Literal["forward", "reverse", "jsd"]
# the loss of each row of logits in a span of positions, and its gradient at those logits where it is wanted
Compare = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None]]


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
    if not head.paths.losses:
        with torch.no_grad():
            wanted = full_logits(teacher_hidden, teacher_head)
        logits = full_logits(hidden, head)
        return _plain_divergence(logits, wanted.to(logits.dtype), temperature, divergence)
    states = teacher_hidden.detach()
    teacher = Head(
        teacher_head.weight.detach().to(states.dtype),
        None if teacher_head.bias is None else teacher_head.bias.detach(),
        teacher_head.scale,
        teacher_head.softcap,
    )

    def compare(
        logits: torch.Tensor, span: slice, want_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wanted = widened(F.linear(states[span], teacher.weight), teacher).to(logits.dtype)
        loss, grad = divergence_of(
            logits / temperature, wanted / temperature, divergence, want_grad=want_grad
        )
        return loss, None if grad is None else grad.div_(temperature)

    return _compared(hidden, head, compare)


def linear_topk_kl(
    hidden: torch.Tensor,
    head: Head,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
) -> torch.Tensor:
    """The same from a teacher's k likeliest tokens `ids` [N, k] and `logprobs` [N, k + 1] at temperature 1.

    All other tokens are one class, the last of `logprobs`, on both sides: the student's is what it gives to
    all of them together. A temperature softens the k + 1 classes of both sides, log p / temperature. So the
    loss is 0 where the sides agree, and without a temperature it is never more than that of all tokens.
    """
    whole = ids.shape[1] == head.weight.shape[0]  # no token is left over
    if not head.paths.losses:
        logits = full_logits(hidden, head)
        rest = logits.scatter(1, ids.long(), -torch.inf).logsumexp(1, keepdim=True)
        classes = torch.cat((logits.gather(1, ids.long()), rest), 1)
        kept = ids.shape[1] if whole else None
        return _plain_divergence(
            classes[:, :kept], logprobs[:, :kept].to(classes.dtype), temperature, divergence
        )

    def compare(
        logits: torch.Tensor, span: slice, want_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen, said = ids[span].long(), logprobs[span].to(logits.dtype)
        classes = logits.gather(1, chosen)
        if whole:
            said = said[:, :-1]
        else:
            rest = logits.scatter(1, chosen, -torch.inf)
            log_rest = rest.logsumexp(1, keepdim=True)
            classes = torch.cat((classes, log_rest), 1)
        loss, grad = divergence_of(classes / temperature, said / temperature, divergence, want_grad=want_grad)
        if grad is None:
            return loss, None
        grad /= temperature
        if whole:
            return loss, torch.zeros_like(logits).scatter_(1, chosen, grad)
        # d log(sum of exp) at each of the rest is its share of them
        spread = rest.sub_(log_rest).exp_().mul_(grad[:, -1:])
        return loss, spread.scatter_(1, chosen, grad[:, :-1])

    return _compared(hidden, head, compare)


def _plain_divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, kind: Divergence
) -> torch.Tensor:
    """The sum over rows of logits, by torch's own operations."""
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if kind == "forward":
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    if kind == "reverse":
        return F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    to_middle = [F.kl_div(middle, side, reduction="sum", log_target=True) for side in (log_p, log_q)]
    return 0.5 * (to_middle[0] + to_middle[1])


def _compared(hidden: torch.Tensor, head: Head, compare: Compare) -> torch.Tensor:
    if not hidden.shape[0]:
        return nothing(hidden, head)
    loss: torch.Tensor = _Compared.apply(*operands(hidden, head), head, compare)
    return loss


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        compare: Compare,
    ) -> torch.Tensor:
        student = Head(weight.to(hidden.dtype), bias, head.scale, head.softcap)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        rows = max(1, chunk_rows(weight) // 2)  # two sides at once
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], rows):
                logits = widened(F.linear(hidden[span], student.weight), student)
                loss, grad = compare(logits, span, any(ctx.needs_input_grad))
                total += loss.sum()
                if grad is None:
                    continue
                grad *= student.scale
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
        return (*grads, None, None)


@torch.no_grad()
def top_logprobs(hidden: torch.Tensor, head: Head, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens at each position [N, k], and log p [N, k + 1] of them and of all others."""
    own = Head(head.weight.to(hidden.dtype), head.bias, head.scale, head.softcap)
    found = []
    with torch.autocast(hidden.device.type, enabled=False):
        for part in hidden.split(max(1, chunk_rows(head.weight) // 2)):
            logs = widened(F.linear(part, own.weight), own).log_softmax(-1)
            best, ids = logs.topk(top_k, dim=-1)
            rest = logs.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
            found.append((ids, torch.cat((best, rest), 1)))
    chosen, logprobs = zip(*found, strict=True)
    return torch.cat(chosen), torch.cat(logprobs)


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
