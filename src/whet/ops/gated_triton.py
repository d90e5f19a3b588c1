"""The kernel behind `gated_gradients`; importing this needs Triton, which comes with torch for CUDA."""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _WARPS = 32, 64, 4  # of a tile: 16 numbers a thread, or registers do not suffice
_STAGES = 3  # tiles that are read ahead
_PROGRAMS = 1024  # about as many, where there are enough rows


def gated_gradients_on_gpu(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor,
    grad_low: torch.Tensor,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A program has some columns, and adds up over its share of the rows."""
    count, size = gate.shape
    ranks = rank, low.shape[1] - rank, grad_low.shape[1]
    blocks = triton.cdiv(size, _COLUMNS)
    share = triton.cdiv(count, triton.cdiv(_PROGRAMS, blocks))
    share = triton.cdiv(share, _ROWS) * _ROWS
    shares = triton.cdiv(count, share)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    sums = gate.new_empty(shares, size, sum(ranks), dtype=torch.float32)
    _gated_gradients[(blocks, shares)](
        gate,
        up,
        grad,
        low,
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
        RANK=max(16, triton.next_power_of_2(max(ranks))),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
    )
    return grad_gate, grad_up, sums.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_gradients(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    gate_at,
    up_at,
    grad_at,
    low_at,
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
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    tile = rows * size + columns[None, :]
    of_gate = tl.zeros((COLUMNS, RANK), tl.float32)
    of_up = tl.zeros((COLUMNS, RANK), tl.float32)
    of_down = tl.zeros((COLUMNS, RANK), tl.float32)
    for step in range(0, share, ROWS):
        start = part * share + step
        first = start.to(tl.int64)  # what is counted from there is small
        there = rows < count - start
        inside = there & (columns[None, :] < size)
        gate = tl.load(gate_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_at + first * size + tile, mask=inside, other=0.0).to(tl.float32)
        openness = 1.0 / (1.0 + tl.exp(-gate))
        active = gate * openness
        grad_gate = (grad * up * (openness + active * (1.0 - openness))).to(kind)
        grad_up = (grad * active).to(kind)
        gated = (active * up).to(kind)
        tl.store(grad_gate_at + first * size + tile, grad_gate, mask=inside)
        tl.store(grad_up_at + first * size + tile, grad_up, mask=inside)
        at = first * (GATE + UP) + (rows * (GATE + UP) + rank)
        low_gate = tl.load(low_at + at, mask=there & (rank < GATE), other=0.0)
        low_up = tl.load(low_at + at + GATE, mask=there & (rank < UP), other=0.0)
        at = first * DOWN + (rows * DOWN + rank)
        grad_low = tl.load(grad_low_at + at, mask=there & (rank < DOWN), other=0.0)
        of_gate = tl.dot(tl.trans(grad_gate), low_gate, of_gate)
        of_up = tl.dot(tl.trans(grad_up), low_up, of_up)
        of_down = tl.dot(tl.trans(gated), grad_low, of_down)
    known = columns[:, None] < size
    at = part.to(tl.int64) * size * (GATE + UP + DOWN) + (columns[:, None] * (GATE + UP + DOWN) + rank)
    tl.store(sums_at + at, of_gate, mask=known & (rank < GATE))
    tl.store(sums_at + at + GATE, of_up, mask=known & (rank < UP))
    tl.store(sums_at + at + GATE + UP, of_down, mask=known & (rank < DOWN))
