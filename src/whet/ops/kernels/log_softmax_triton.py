"""The Triton kernel of `token_losses`. Importing it requires Triton, which CUDA builds of PyTorch include."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from whet.ops.lm_head import Head

_BLOCK = 4096  # columns per iteration: 16-byte loads in every thread, without spilling registers
_WARPS = 8


def token_losses_on_gpu(
    projected: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    token_weights: torch.Tensor | None,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `token_losses` by a Triton kernel. The gradient has the dtype of `projected`."""
    rows, columns = projected.shape
    losses = torch.empty(rows, device=projected.device, dtype=torch.float32)
    _token_losses[(rows,)](
        projected,
        targets,
        losses,
        projected if token_weights is None else token_weights,
        projected if head.bias is None else head.bias,
        columns,
        projected.stride(0),
        head.scale,
        0.0 if head.softcap is None else head.softcap,
        GRADIENT=with_gradient,
        WEIGHTED=token_weights is not None,
        BIASED=head.bias is not None,
        CAPPED=head.softcap is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # explicit, because the default depends on the Triton version
    )
    return losses, projected if with_gradient else None


@triton.jit  # type: ignore[untyped-decorator]
def _token_losses(  # type: ignore[no-untyped-def]  # Triton reads only constexpr annotations
    logits_ptr,
    targets_ptr,
    losses_ptr,
    weights_ptr,
    bias_ptr,
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
    """One program per row: an online softmax over the columns, then a second pass for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    maximum = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z = _load_logits(logits_ptr, bias_ptr, offsets, columns, scale, cap, BIASED, CAPPED)
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(z - new_maximum), 0)
        maximum = new_maximum
    log_total = maximum + tl.log(total)
    target_logit = _load_logits(
        logits_ptr, bias_ptr, target + tl.arange(0, 1), columns, scale, cap, BIASED, CAPPED
    )
    tl.store(losses_ptr + row, log_total - tl.sum(target_logit, 0))
    if GRADIENT:
        factor = scale
        if WEIGHTED:
            factor = scale * tl.load(weights_ptr + row).to(tl.float32)
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            z = _load_logits(logits_ptr, bias_ptr, offsets, columns, scale, cap, BIASED, CAPPED)
            grad = (tl.exp(z - log_total) - tl.where(offsets == target, 1.0, 0.0)) * factor
            if CAPPED:
                grad = grad * (1.0 - (z / cap) * (z / cap))
            tl.store(logits_ptr + offsets, grad.to(logits_ptr.dtype.element_ty), mask=offsets < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _load_logits(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    offsets,
    columns,
    scale,
    cap,
    BIASED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
):
    """Load logits of some columns in float32, with bias, scale and softcap; -inf past the last column."""
    z = tl.load(logits_ptr + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    if BIASED:
        z += tl.load(bias_ptr + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    z = z * scale
    if CAPPED:
        z = cap * libdevice.tanh(z / cap)
    return tl.where(offsets < columns, z, -float("inf"))
