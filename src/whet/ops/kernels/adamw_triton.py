"""A Triton kernel of the AdamW update of one large tensor. CUDA builds of PyTorch include Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 8  # eight elements per thread: 16-byte loads of bf16


def adamw_on_gpu(
    p: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    corrections: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: torch.Tensor | None,
    divisor: torch.Tensor | None,
) -> None:
    """Apply the AdamW update in place, like torch's fused kernel. All tensors must be contiguous.

    `corrections` holds 1 - beta1 ** step and sqrt(1 - beta2 ** step). If `skip` is 1, nothing changes. The
    gradient is divided by `divisor`.
    """
    beta1, beta2 = betas
    size = p.numel()
    _adamw[(triton.cdiv(size, _BLOCK),)](
        p,
        grad,
        exp_avg,
        exp_avg_sq,
        corrections,
        corrections if skip is None else skip,
        corrections if divisor is None else divisor,
        size,
        lr,
        1 - lr * weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        SKIPPABLE=skip is not None,
        DIVIDED=divisor is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # explicit, because the default depends on the Triton version
    )


@triton.jit(do_not_specialize=["lr", "decay"])  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # Triton reads only constexpr annotations
    p_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    corrections_ptr,
    skip_ptr,
    divisor_ptr,
    size,
    lr,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    SKIPPABLE: tl.constexpr,  # noqa: N803
    DIVIDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    if SKIPPABLE:  # noqa: SIM102  # known at compile time
        if tl.load(skip_ptr) != 0.0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    p = tl.load(p_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)
    if DIVIDED:
        grad = grad / tl.load(divisor_ptr)
    exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    step_size = lr / tl.load(corrections_ptr)
    p = p * decay - step_size * exp_avg / (tl.sqrt(exp_avg_sq) / tl.load(corrections_ptr + 1) + eps)
    tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + offsets, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
