"""Matrices in 8 bits, as they are and turned, read once; importing this needs Triton (torch for CUDA)."""

import torch
import triton
import triton.language as tl

_TALL, _WIDE, _WARPS = 128, 64, 8


def turned_on_gpu(
    matrix: torch.Tensor, scale: torch.Tensor, turned: torch.Tensor, same: torch.Tensor | None
) -> None:
    """Write matrix / scale [rows, width] into `turned` [width, more], and into `same` [more, width].

    All are contiguous; rows that the matrix does not have are zeros.
    """
    rows, width = matrix.shape
    more = turned.shape[1]
    grid = (triton.cdiv(more, _TALL), triton.cdiv(width, _WIDE))
    _turned[grid](
        matrix,
        scale,
        turned,
        turned if same is None else same,
        rows,
        width,
        more,
        BOTH=same is not None,
        TALL=_TALL,
        WIDE=_WIDE,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
    )


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    matrix_at,
    scale_at,
    turned_at,
    same_at,
    rows,
    width,
    more,
    BOTH: tl.constexpr,  # noqa: N803
    TALL: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    across = row[:, None] * width + column[None, :]
    known = (row[:, None] < rows) & (column[None, :] < width)
    scale = tl.load(scale_at)
    exact = tl.load(matrix_at + across, mask=known, other=0.0).to(tl.float32)
    # Each copy is rounded by itself, since ptxas 12.8 loses numbers that are rounded once and then stored
    # and turned. Division by a power of two and the product with its inverse are exact, so both are the same.
    if BOTH:
        inside = (row[:, None] < more) & (column[None, :] < width)
        tl.store(same_at + across, (exact / scale).to(same_at.dtype.element_ty), mask=inside)
    down = column[:, None] * more + row[None, :]
    turned = tl.trans((exact * (1.0 / scale)).to(turned_at.dtype.element_ty))
    tl.store(turned_at + down, turned, mask=(column[:, None] < width) & (row[None, :] < more))
