"""AdamW's update of one large tensor on a GPU; importing this needs Triton, which is in torch for CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 8  # eight numbers a thread: 16 bytes at a time of bf16


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
    """As torch's fused kernel, in place; all tensors are contiguous.

    `corrections` are 1 - beta1 ** step and the root of 1 - beta2 ** step. With `skip` at 1 nothing changes.
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
        MASKED=skip is not None,
        DIVIDED=divisor is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
    )


@triton.jit(do_not_specialize=["lr", "keep"])  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    p_at,
    grad_at,
    first_at,
    second_at,
    corrections_at,
    skip_at,
    divisor_at,
    size,
    lr,
    keep,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    MASKED: tl.constexpr,  # noqa: N803
    DIVIDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    if MASKED:  # noqa: SIM102  # this one is known while compiling
        if tl.load(skip_at) != 0.0:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(p_at + at, mask=inside).to(tl.float32)
    grad = tl.load(grad_at + at, mask=inside).to(tl.float32)
    first = tl.load(first_at + at, mask=inside).to(tl.float32)
    second = tl.load(second_at + at, mask=inside).to(tl.float32)
    if DIVIDED:
        grad = grad / tl.load(divisor_at)
    first = beta1 * first + rest1 * grad
    second = beta2 * second + rest2 * grad * grad
    size_of_step = lr / tl.load(corrections_at)
    p = p * keep - size_of_step * first / (tl.sqrt(second) / tl.load(corrections_at + 1) + eps)
    tl.store(p_at + at, p.to(p_at.dtype.element_ty), mask=inside)
    tl.store(first_at + at, first.to(first_at.dtype.element_ty), mask=inside)
    tl.store(second_at + at, second.to(second_at.dtype.element_ty), mask=inside)
