"""Divergence between student and teacher predictions, in chunks, without the full logits of either."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from whet.ops.cross_entropy import chunk_rows, spans
from whet.ops.lm_head import Head, HeadGradients, full_logits, head_operands, zero_loss
from whet.ops.log_softmax import to_wide_logits

Divergence = Literal["forward", "reverse", "jsd"]
# (logits, span of positions, with_gradient) -> loss of each row, and its gradient at the logits or None
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
    """Return the sum over positions of the divergence of softmax(logits / temperature), in float32 or wider.

    The gradient reaches only the student. It is computed together with the loss, so the logits are computed
    only once.

    Args:
        hidden: The student's hidden states [N, D].
        head: The student's output head.
        teacher_hidden: The teacher's hidden states [N, D of the teacher].
        teacher_head: The teacher's output head.
        temperature: Divides the logits of both.
        divergence: `forward` is KL(teacher || student), `reverse` is KL(student || teacher), and `jsd` is the
            Jensen-Shannon divergence.
    """
    if not head.paths.losses:
        with torch.no_grad():
            teacher_logits = full_logits(teacher_hidden, teacher_head)
        logits = full_logits(hidden, head)
        return _plain_divergence(logits, teacher_logits.to(logits.dtype), temperature, divergence)
    states = teacher_hidden.detach()
    teacher = Head(
        teacher_head.weight.detach().to(states.dtype),
        None if teacher_head.bias is None else teacher_head.bias.detach(),
        teacher_head.scale,
        teacher_head.softcap,
    )

    def compare(
        logits: torch.Tensor, span: slice, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        teacher_logits = to_wide_logits(F.linear(states[span], teacher.weight), teacher).to(logits.dtype)
        loss, grad = row_divergence(
            logits / temperature, teacher_logits / temperature, divergence, with_gradient=with_gradient
        )
        return loss, None if grad is None else grad.div_(temperature)

    return _chunked_divergence(hidden, head, compare)


def linear_topk_kl(
    hidden: torch.Tensor,
    head: Head,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
) -> torch.Tensor:
    """Return the divergence of `linear_kl` computed from the teacher's k most likely tokens.

    All other tokens form one class for both student and teacher. The loss is 0 if they agree on the k + 1
    classes. At temperature 1 it never exceeds the divergence over all tokens.

    Args:
        hidden: The student's hidden states [N, D].
        head: The student's output head.
        ids: The teacher's k most likely tokens [N, k].
        logprobs: The teacher's log-probabilities [N, k + 1] at temperature 1. The last is that of all other
            tokens.
        temperature: Divides the log-probabilities of the k + 1 classes of both.
        divergence: As in `linear_kl`.
    """
    covers_vocab = ids.shape[1] == head.weight.shape[0]  # no other tokens
    if not head.paths.losses:
        logits = full_logits(hidden, head)
        rest = logits.scatter(1, ids.long(), -torch.inf).logsumexp(1, keepdim=True)
        classes = torch.cat((logits.gather(1, ids.long()), rest), 1)
        classes_used = ids.shape[1] if covers_vocab else None
        return _plain_divergence(
            classes[:, :classes_used], logprobs[:, :classes_used].to(classes.dtype), temperature, divergence
        )

    def compare(
        logits: torch.Tensor, span: slice, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        token_ids, teacher_logprobs = ids[span].long(), logprobs[span].to(logits.dtype)
        classes = logits.gather(1, token_ids)
        if covers_vocab:
            teacher_logprobs = teacher_logprobs[:, :-1]
        else:
            rest = logits.scatter(1, token_ids, -torch.inf)
            log_rest = rest.logsumexp(1, keepdim=True)
            classes = torch.cat((classes, log_rest), 1)
        loss, grad = row_divergence(
            classes / temperature, teacher_logprobs / temperature, divergence, with_gradient=with_gradient
        )
        if grad is None:
            return loss, None
        grad /= temperature
        if covers_vocab:
            return loss, torch.zeros_like(logits).scatter_(1, token_ids, grad)
        # the gradient of logsumexp at each other token is its share of their probability
        full_grad = rest.sub_(log_rest).exp_().mul_(grad[:, -1:])
        return loss, full_grad.scatter_(1, token_ids, grad[:, :-1])

    return _chunked_divergence(hidden, head, compare)


def _plain_divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, kind: Divergence
) -> torch.Tensor:
    """Return the sum over rows of logits of their divergence, by plain PyTorch."""
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if kind == "forward":
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    if kind == "reverse":
        return F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    mixture = torch.logaddexp(log_p, log_q) - math.log(2)
    to_mixture = [
        F.kl_div(mixture, log_probs, reduction="sum", log_target=True) for log_probs in (log_p, log_q)
    ]
    return 0.5 * (to_mixture[0] + to_mixture[1])


def _chunked_divergence(hidden: torch.Tensor, head: Head, compare: Compare) -> torch.Tensor:
    if not hidden.shape[0]:
        return zero_loss(hidden, head)
    loss: torch.Tensor = _ChunkedDivergence.apply(*head_operands(hidden, head), head, compare)
    return loss


class _ChunkedDivergence(torch.autograd.Function):
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
        rows = max(1, chunk_rows(weight) // 2)  # logits of student and teacher
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans(hidden.shape[0], rows):
                logits = to_wide_logits(F.linear(hidden[span], student.weight), student)
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
    """Return the k most likely tokens per position [N, k], and log p [N, k + 1] of them and of all others."""
    teacher = Head(head.weight.to(hidden.dtype), head.bias, head.scale, head.softcap)
    chunks = []
    with torch.autocast(hidden.device.type, enabled=False):
        for part in hidden.split(max(1, chunk_rows(head.weight) // 2)):
            logs = to_wide_logits(F.linear(part, teacher.weight), teacher).log_softmax(-1)
            best, ids = logs.topk(top_k, dim=-1)
            rest = logs.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
            chunks.append((ids, torch.cat((best, rest), 1)))
    token_ids, logprobs = zip(*chunks, strict=True)
    return torch.cat(token_ids), torch.cat(logprobs)


def row_divergence(
    student: torch.Tensor, teacher: torch.Tensor, kind: Divergence, *, with_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the divergence of each row of logits [rows, V], and its gradient at the student's logits."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    q = log_q.exp()
    if kind == "forward":
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), q - p if with_gradient else None
    reference = (
        log_p if kind == "reverse" else torch.logaddexp(log_p, log_q) - torch.log(log_q.new_tensor(2.0))
    )
    gap = log_q - reference
    reverse_kl = (q * gap).sum(-1)
    if kind == "reverse":
        return reverse_kl, q * (gap - reverse_kl[:, None]) if with_gradient else None
    loss = 0.5 * reverse_kl + 0.5 * (log_p.exp() * (log_p - reference)).sum(-1)
    return loss, 0.5 * q * (gap - reverse_kl[:, None]) if with_gradient else None
