"""The kernel behind `row_losses` on a GPU; importing this needs Triton, which comes with torch for CUDA."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from whet.ops.lm_head import Head

_BLOCK = 4096  # columns at a time: wide enough for 16-byte loads of every thread, few enough for registers
_WARPS = 8


def row_losses_on_gpu(
    projected: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    row_weight: torch.Tensor | None,
    want_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `row_losses`; the gradient is in the dtype of `projected`."""
    rows, columns = projected.shape
    losses = torch.empty(rows, device=projected.device, dtype=torch.float32)
    _row_losses[(rows,)](
        projected,
        targets,
        losses,
        projected if row_weight is None else row_weight,
        projected if head.bias is None else head.bias,
        columns,
        projected.stride(0),
        head.scale,
        0.0 if head.softcap is None else head.softcap,
        GRADIENT=want_gradient,
        WEIGHTED=row_weight is not None,
        BIASED=head.bias is not None,
        CAPPED=head.softcap is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
    )
    return losses, projected if want_gradient else None


@triton.jit  # type: ignore[untyped-decorator]
def _row_losses(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    logits_at,
    targets_at,
    losses_at,
    weights_at,
    bias_at,
    columns,
    stride,
    scale,
    cap,
    GRADIENT: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
    BIASED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row: a running maximum and sum over the columns, then the gradient over them again."""
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * stride
    target = tl.load(targets_at + row)
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _transformed(logits_at, bias_at, at, columns, scale, cap, BIASED, CAPPED)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    log_total = top + tl.log(total)
    own = _transformed(logits_at, bias_at, target + tl.arange(0, 1), columns, scale, cap, BIASED, CAPPED)
    tl.store(losses_at + row, log_total - tl.sum(own, 0))
    if GRADIENT:
        factor = scale
        if WEIGHTED:
            factor = scale * tl.load(weights_at + row).to(tl.float32)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _transformed(logits_at, bias_at, at, columns, scale, cap, BIASED, CAPPED)
            grad = (tl.exp(z - log_total) - tl.where(at == target, 1.0, 0.0)) * factor
            if CAPPED:
                grad = grad * (1.0 - (z / cap) * (z / cap))
            tl.store(logits_at + at, grad.to(logits_at.dtype.element_ty), mask=at < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(logits_at, bias_at, at, columns, scale, cap, BIASED: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Logits of some columns in float32: with the bias, scaled and capped; -inf past the end."""
    z = tl.load(logits_at + at, mask=at < columns, other=0.0).to(tl.float32)
    if BIASED:
        z += tl.load(bias_at + at, mask=at < columns, other=0.0).to(tl.float32)
    z = z * scale
    if CAPPED:
        z = cap * libdevice.tanh(z / cap)
    return tl.where(at < columns, z, -float("inf"))
