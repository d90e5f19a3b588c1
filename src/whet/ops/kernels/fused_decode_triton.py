"""The kernels behind `fused_decode`; importing this needs Triton, which comes with torch for CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def rms_norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool) -> torch.Tensor:
    """One program a row."""
    size, rows = x.shape[-1], _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(size), 4096)
    _rms_norm[(len(rows),)](
        rows,
        weight.contiguous(),
        y,
        rows.stride(0),
        eps,
        SIZE=size,
        OFFSET=offset,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        enable_fp_fusion=True,  # versions of Triton differ in what they take it for
    )
    return y


def rotate_on_gpu(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One program a head of a position."""
    batch, heads, length, size = x.shape
    x, cos, sin = (each if each.stride(3) == 1 else each.contiguous() for each in (x, cos, sin))
    cos, sin = (each.expand(batch, 1, length, size) for each in (cos, sin))
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    _rotate[(batch * heads * length,)](
        x,
        cos,
        sin,
        y,
        heads,
        length,
        *x.stride()[:3],
        cos.stride(0),
        cos.stride(2),
        sin.stride(0),
        sin.stride(2),
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        num_warps=1,
        enable_fp_fusion=False,  # each product is rounded
    )
    return y


def silu_gate_on_gpu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both as rows, which may be halves of wider ones."""
    size, one, other = gate.shape[-1], _rows(gate), _rows(up)
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    grid = (len(one), triton.cdiv(size, _BLOCK))
    _silu_gate[grid](
        one,
        other,
        y,
        one.stride(0),
        other.stride(0),
        size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Two dimensions, the second without gaps."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]  # triton reads no annotations but these
    x_at,
    weight_at,
    y_at,
    stride,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    x_at += row * stride
    y_at += row * SIZE
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, mask=at < SIZE, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, mask=at < SIZE, other=0.0).to(tl.float32) * scale
        weight = tl.load(weight_at + at, mask=at < SIZE, other=0.0)
        if OFFSET:
            y = x * (1.0 + weight.to(tl.float32))
        else:
            kind = y_at.dtype.element_ty
            y = x.to(kind).to(tl.float32) * weight.to(kind).to(tl.float32)
        tl.store(y_at + at, y.to(y_at.dtype.element_ty), mask=at < SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x_at,
    cos_at,
    sin_at,
    y_at,
    heads,
    length,
    x_row,
    x_head,
    x_place,
    cos_row,
    cos_place,
    sin_row,
    sin_place,
    HALF: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    place, head, row = program % length, program // length % heads, program // length // heads
    x_at += row * x_row + head * x_head + place * x_place
    cos_at += row * cos_row + place * cos_place
    sin_at += row * sin_row + place * sin_place
    y_at += program * 2 * HALF
    at = tl.arange(0, BLOCK)
    there = at < HALF
    first = tl.load(x_at + at, mask=there).to(tl.float32)
    second = tl.load(x_at + HALF + at, mask=there).to(tl.float32)
    _turn(first, -second, cos_at + at, sin_at + at, y_at + at, there)
    at += HALF
    _turn(second, first, cos_at + at, sin_at + at, y_at + at, there)


@triton.jit
def _turn(own, other, cos_at, sin_at, y_at, there):  # type: ignore[no-untyped-def]
    kind = y_at.dtype.element_ty
    by_cos = own * tl.load(cos_at, mask=there).to(tl.float32)
    by_sin = other * tl.load(sin_at, mask=there).to(tl.float32)
    tl.store(y_at, (by_cos.to(kind).to(tl.float32) + by_sin.to(kind).to(tl.float32)).to(kind), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_gate(  # type: ignore[no-untyped-def]
    gate_at,
    up_at,
    y_at,
    gate_row,
    up_row,
    size,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_at + row * gate_row + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(up_at + row * up_row + at, mask=at < size, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(gate_at.dtype.element_ty).to(tl.float32)
    tl.store(y_at + row * size + at, (active * up).to(y_at.dtype.element_ty), mask=at < size)
