"""The Triton kernel that quantizes to fp8 and transposes. CUDA builds of PyTorch include Triton."""

import torch
import triton
import triton.language as tl

_BLOCK_ROWS, _BLOCK_COLUMNS, _WARPS = 128, 64, 8


def quantize_on_gpu(
    matrix: torch.Tensor, scale: torch.Tensor, transposed: torch.Tensor, quantized: torch.Tensor | None
) -> None:
    """Write matrix / scale [rows, width] to `transposed` [width, padded], and to `quantized` [padded, width].

    All tensors are contiguous. Padding rows are filled with zeros.
    """
    rows, width = matrix.shape
    padded_rows = transposed.shape[1]
    grid = (triton.cdiv(padded_rows, _BLOCK_ROWS), triton.cdiv(width, _BLOCK_COLUMNS))
    _quantize[grid](
        matrix,
        scale,
        transposed,
        transposed if quantized is None else quantized,
        rows,
        width,
        padded_rows,
        BOTH=quantized is not None,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # explicit, because the default depends on the Triton version
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]  # Triton reads only constexpr annotations
    matrix_ptr,
    scale_ptr,
    transposed_ptr,
    quantized_ptr,
    rows,
    width,
    padded_rows,
    BOTH: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    offsets = row[:, None] * width + column[None, :]
    in_matrix = (row[:, None] < rows) & (column[None, :] < width)
    scale = tl.load(scale_ptr)
    values = tl.load(matrix_ptr + offsets, mask=in_matrix, other=0.0).to(tl.float32)
    # Each copy is rounded separately, because ptxas 12.8 loses values that are rounded once and then both
    # stored and transposed. Dividing by a power of two and multiplying by its inverse are both exact, so the
    # copies are equal.
    if BOTH:
        in_output = (row[:, None] < padded_rows) & (column[None, :] < width)
        tl.store(quantized_ptr + offsets, (values / scale).to(quantized_ptr.dtype.element_ty), mask=in_output)
    transposed_offsets = column[:, None] * padded_rows + row[None, :]
    transposed = tl.trans((values * (1.0 / scale)).to(transposed_ptr.dtype.element_ty))
    tl.store(
        transposed_ptr + transposed_offsets,
        transposed,
        mask=(column[:, None] < width) & (row[None, :] < padded_rows),
    )
