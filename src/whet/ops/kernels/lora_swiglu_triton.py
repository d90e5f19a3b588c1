"""The Triton kernels of `lora_swiglu`. CUDA builds of PyTorch include Triton."""

import torch
import triton
import triton.language as tl

from whet.ops.kernels.lora_swiglu import GRADIENT_TILE, partial_sums

# rank: (rows, columns, warps) of a tile; larger tiles do not fit into registers
_OUTPUT_TILES = {16: (16, 128, 4), 32: (32, 128, 4)}
_WARPS, _STAGES = 4, 2  # for the gradients


def gated_output_on_gpu(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor
) -> torch.Tensor:
    """Compute `gated_output`, with one program per tile."""
    count, size = gate.shape
    rank = _padded_rank(b_gate.shape[1], b_up.shape[1])
    rows, columns, warps = _OUTPUT_TILES[rank]
    y = torch.empty_like(gate)
    _gated_output[(triton.cdiv(size, columns) * triton.cdiv(count, rows),)](
        gate,
        up,
        low,
        b_gate,
        b_up,
        y,
        count,
        size,
        GATE=b_gate.shape[1],
        UP=b_up.shape[1],
        RANK=rank,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        enable_fp_fusion=True,  # explicit, because the default depends on the Triton version
    )
    return y


def gated_gradients_on_gpu(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    grad_low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `gated_gradients`. Each program sums a block of columns over its share of the rows."""
    count, size = gate.shape
    rows, columns = GRADIENT_TILE
    ranks = b_gate.shape[1], b_up.shape[1], grad_low.shape[1]
    rows_per_program, sums = partial_sums(gate, low, grad_low)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _gated_gradients[(triton.cdiv(size, columns), len(sums))](
        gate,
        up,
        grad,
        low,
        b_gate,
        b_up,
        grad_low,
        grad_gate,
        grad_up,
        sums,
        count,
        size,
        rows_per_program,
        GATE=ranks[0],
        UP=ranks[1],
        DOWN=ranks[2],
        RANK=_padded_rank(*ranks),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )
    return grad_gate, grad_up, sums.sum(0)


def _padded_rank(*ranks: int) -> int:
    """Return the tile width for these ranks: a power of two, at least 16, as `tl.dot` requires."""
    rank: int = max(16, triton.next_power_of_2(max(ranks)))
    return rank


@triton.jit  # type: ignore[untyped-decorator]
def _gated_output(  # type: ignore[no-untyped-def]  # Triton reads only constexpr annotations
    gate_ptr,
    up_ptr,
    low_ptr,
    b_gate_ptr,
    b_up_ptr,
    y_ptr,
    count,
    size,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    blocks = tl.cdiv(size, COLUMNS)
    start = tl.program_id(0) // blocks * ROWS
    first_row = start.to(tl.int64)  # offsets within the tile fit into 32 bits
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < count - start) & (columns < size)
    tile = first_row * size + (rows * size + columns)
    b_gate, b_up = _read_b(b_gate_ptr, b_up_ptr, columns, size, GATE, UP, RANK)
    low_gate, low_up = _read_low(low_ptr, start, rows, count, GATE, UP, RANK)
    gate = tl.load(gate_ptr + tile, mask=mask, other=0.0).to(tl.float32) + tl.dot(low_gate, b_gate)
    up = tl.load(up_ptr + tile, mask=mask, other=0.0).to(tl.float32) + tl.dot(low_up, b_up)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + tile, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_gradients(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    grad_ptr,
    low_ptr,
    b_gate_ptr,
    b_up_ptr,
    grad_low_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    sums_ptr,
    count,
    size,
    rows_per_program,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    DOWN: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    block, part = tl.program_id(0), tl.program_id(1)
    dtype = gate_ptr.dtype.element_ty
    rank = tl.arange(0, RANK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    columns = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = rows * size + columns
    b_gate, b_up = _read_b(b_gate_ptr, b_up_ptr, columns, size, GATE, UP, RANK)
    gate_sums = tl.zeros((COLUMNS, RANK), tl.float32)
    up_sums = tl.zeros((COLUMNS, RANK), tl.float32)
    down_sums = tl.zeros((COLUMNS, RANK), tl.float32)
    for step in range(0, rows_per_program, ROWS):
        start = part * rows_per_program + step
        first_row = start.to(tl.int64)  # offsets within the tile fit into 32 bits
        row_mask = rows < count - start
        mask = row_mask & (columns < size)
        gate = tl.load(gate_ptr + first_row * size + tile, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + first_row * size + tile, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + first_row * size + tile, mask=mask, other=0.0).to(tl.float32)
        low_gate, low_up = _read_low(low_ptr, start, rows, count, GATE, UP, RANK)
        offsets = first_row * DOWN + (rows * DOWN + rank)
        grad_low = tl.load(grad_low_ptr + offsets, mask=row_mask & (rank < DOWN), other=0.0)
        gate += tl.dot(low_gate, b_gate)
        up += tl.dot(low_up, b_up)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        activated = gate * sigmoid
        grad_gate = (grad * up * (sigmoid + activated * (1.0 - sigmoid))).to(dtype)
        grad_up = (grad * activated).to(dtype)
        tl.store(grad_gate_ptr + first_row * size + tile, grad_gate, mask=mask)
        tl.store(grad_up_ptr + first_row * size + tile, grad_up, mask=mask)
        gate_sums = tl.dot(tl.trans(grad_gate), low_gate, gate_sums)
        up_sums = tl.dot(tl.trans(grad_up), low_up, up_sums)
        down_sums = tl.dot(tl.trans((activated * up).to(dtype)), grad_low, down_sums)
    sum_columns = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    offsets = part.to(tl.int64) * size * (GATE + UP + DOWN) + (sum_columns * (GATE + UP + DOWN) + rank)
    tl.store(sums_ptr + offsets, gate_sums, mask=(sum_columns < size) & (rank < GATE))
    tl.store(sums_ptr + offsets + GATE, up_sums, mask=(sum_columns < size) & (rank < UP))
    tl.store(sums_ptr + offsets + GATE + UP, down_sums, mask=(sum_columns < size) & (rank < DOWN))


@triton.jit  # type: ignore[untyped-decorator]
def _read_b(  # type: ignore[no-untyped-def]
    b_gate_ptr,
    b_up_ptr,
    columns,
    size,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    rank = tl.arange(0, RANK)[:, None]
    b_gate = tl.load(b_gate_ptr + columns * GATE + rank, mask=(columns < size) & (rank < GATE), other=0.0)
    b_up = tl.load(b_up_ptr + columns * UP + rank, mask=(columns < size) & (rank < UP), other=0.0)
    return b_gate, b_up


@triton.jit  # type: ignore[untyped-decorator]
def _read_low(  # type: ignore[no-untyped-def]
    low_ptr,
    start,
    rows,
    count,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    rank = tl.arange(0, RANK)[None, :]
    row_mask = rows < count - start
    offsets = start.to(tl.int64) * (GATE + UP) + (rows * (GATE + UP) + rank)
    low_gate = tl.load(low_ptr + offsets, mask=row_mask & (rank < GATE), other=0.0)
    low_up = tl.load(low_ptr + offsets + GATE, mask=row_mask & (rank < UP), other=0.0)
    return low_gate, low_up
