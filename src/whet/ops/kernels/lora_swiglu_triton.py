"""The kernels behind `lora_swiglu`; importing this needs Triton, which comes with torch for CUDA."""

import torch
import triton
import triton.language as tl

from whet.ops.kernels.lora_swiglu import GRADIENT_TILE, partial_sums

# by the rank, rows, columns and warps of tiles: larger ones do not fit into registers
_OUTPUT = {16: (16, 128, 4), 32: (32, 128, 4)}
_WARPS, _STAGES = 4, 2  # for the gradients


def gated_output_on_gpu(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor
) -> torch.Tensor:
    """A program makes one tile."""
    count, size = gate.shape
    rank = _padded(b_gate.shape[1], b_up.shape[1])
    rows, columns, warps = _OUTPUT[rank]
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
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
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
    """A program has some columns, and adds up over its share of the rows."""
    count, size = gate.shape
    rows, columns = GRADIENT_TILE
    ranks = b_gate.shape[1], b_up.shape[1], grad_low.shape[1]
    share, sums = partial_sums(gate, low, grad_low)
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
        share,
        GATE=ranks[0],
        UP=ranks[1],
        DOWN=ranks[2],
        RANK=_padded(*ranks),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )
    return grad_gate, grad_up, sums.sum(0)


def _padded(*ranks: int) -> int:
    """What a product of tiles takes."""
    found: int = max(16, triton.next_power_of_2(max(ranks)))
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _gated_output(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    gate_at,
    up_at,
    low_at,
    b_gate_at,
    b_up_at,
    y_at,
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
    first = start.to(tl.int64)  # what is counted from there is small
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    inside = (rows < count - start) & (columns < size)
    tile = first * size + (rows * size + columns)
    b_gate, b_up = _read_b(b_gate_at, b_up_at, columns, size, GATE, UP, RANK)
    low_gate, low_up = _read_low(low_at, start, rows, count, GATE, UP, RANK)
    gate = tl.load(gate_at + tile, mask=inside, other=0.0).to(tl.float32) + tl.dot(low_gate, b_gate)
    up = tl.load(up_at + tile, mask=inside, other=0.0).to(tl.float32) + tl.dot(low_up, b_up)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_at + tile, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_gradients(  # type: ignore[no-untyped-def]
    gate_at,
    up_at,
    grad_at,
    low_at,
    b_gate_at,
    b_up_at,
    grad_low_at,
    grad_gate_at,
    grad_up_at,
    sums_at,
    count,
    size,
    share,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    DOWN: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    block, part = tl.program_id(0), tl.program_id(1)
    kind = gate_at.dtype.element_ty
    rank = tl.arange(0, RANK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    columns = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = rows * size + columns
    b_gate, b_up = _read_b(b_gate_at, b_up_at, columns, size, GATE, UP, RANK)
    of_gate = tl.zeros((COLUMNS, RANK), tl.float32)
    of_up = tl.zeros((COLUMNS, RANK), tl.float32)
    of_down = tl.zeros((COLUMNS, RANK), tl.float32)
    for step in range(0, share, ROWS):
        start = part * share + step
        first = start.to(tl.int64)  # what is counted from there is small
        there = rows < count - start
        inside = there & (columns < size)
        gate = tl.load(gate_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        low_gate, low_up = _read_low(low_at, start, rows, count, GATE, UP, RANK)
        at = first * DOWN + (rows * DOWN + rank)
        grad_low = tl.load(grad_low_at + at, mask=there & (rank < DOWN), other=0.0)
        gate += tl.dot(low_gate, b_gate)
        up += tl.dot(low_up, b_up)
        openness = 1.0 / (1.0 + tl.exp(-gate))
        active = gate * openness
        grad_gate = (grad * up * (openness + active * (1.0 - openness))).to(kind)
        grad_up = (grad * active).to(kind)
        tl.store(grad_gate_at + first * size + tile, grad_gate, mask=inside)
        tl.store(grad_up_at + first * size + tile, grad_up, mask=inside)
        of_gate = tl.dot(tl.trans(grad_gate), low_gate, of_gate)
        of_up = tl.dot(tl.trans(grad_up), low_up, of_up)
        of_down = tl.dot(tl.trans((active * up).to(kind)), grad_low, of_down)
    own = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    at = part.to(tl.int64) * size * (GATE + UP + DOWN) + (own * (GATE + UP + DOWN) + rank)
    tl.store(sums_at + at, of_gate, mask=(own < size) & (rank < GATE))
    tl.store(sums_at + at + GATE, of_up, mask=(own < size) & (rank < UP))
    tl.store(sums_at + at + GATE + UP, of_down, mask=(own < size) & (rank < DOWN))


@triton.jit  # type: ignore[untyped-decorator]
def _read_b(  # type: ignore[no-untyped-def]
    b_gate_at,
    b_up_at,
    columns,
    size,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    rank = tl.arange(0, RANK)[:, None]
    b_gate = tl.load(b_gate_at + columns * GATE + rank, mask=(columns < size) & (rank < GATE), other=0.0)
    b_up = tl.load(b_up_at + columns * UP + rank, mask=(columns < size) & (rank < UP), other=0.0)
    return b_gate, b_up


@triton.jit  # type: ignore[untyped-decorator]
def _read_low(  # type: ignore[no-untyped-def]
    low_at,
    start,
    rows,
    count,
    GATE: tl.constexpr,  # noqa: N803
    UP: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
):
    rank = tl.arange(0, RANK)[None, :]
    there = rows < count - start
    at = start.to(tl.int64) * (GATE + UP) + (rows * (GATE + UP) + rank)
    low_gate = tl.load(low_at + at, mask=there & (rank < GATE), other=0.0)
    low_up = tl.load(low_at + at + GATE, mask=there & (rank < UP), other=0.0)
    return low_gate, low_up
