"""The Triton kernels of `fused_decode`. CUDA builds of PyTorch include Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def rms_norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool) -> torch.Tensor:
    """Normalize x over its last dimension, with one program per row."""
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
        enable_fp_fusion=True,  # explicit, because the default depends on the Triton version
    )
    return y


def rotate_on_gpu(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x, with one program per head and position."""
    batch, heads, length, size = x.shape
    x, cos, sin = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (x, cos, sin))
    cos, sin = (tensor.expand(batch, 1, length, size) for tensor in (cos, sin))
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
        enable_fp_fusion=False,  # every product must be rounded separately
    )
    return y


def silu_gate_on_gpu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Both may be halves of a fused projection, so their rows may be strided."""
    size, gate_rows, up_rows = gate.shape[-1], _rows(gate), _rows(up)
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    grid = (len(gate_rows), triton.cdiv(size, _BLOCK))
    _silu_gate[grid](
        gate_rows,
        up_rows,
        y,
        gate_rows.stride(0),
        up_rows.stride(0),
        size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape to two dimensions with a contiguous last one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]  # Triton reads only constexpr annotations
    x_ptr,
    weight_ptr,
    y_ptr,
    stride,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    y_ptr += row * SIZE
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < SIZE, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < SIZE, other=0.0).to(tl.float32) * scale
        weight = tl.load(weight_ptr + offsets, mask=offsets < SIZE, other=0.0)
        if OFFSET:
            y = x * (1.0 + weight.to(tl.float32))
        else:
            dtype = y_ptr.dtype.element_ty
            y = x.to(dtype).to(tl.float32) * weight.to(dtype).to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    heads,
    length,
    x_row_stride,
    x_head_stride,
    x_position_stride,
    cos_row_stride,
    cos_position_stride,
    sin_row_stride,
    sin_position_stride,
    HALF: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    position, head, row = program % length, program // length % heads, program // length // heads
    x_ptr += row * x_row_stride + head * x_head_stride + position * x_position_stride
    cos_ptr += row * cos_row_stride + position * cos_position_stride
    sin_ptr += row * sin_row_stride + position * sin_position_stride
    y_ptr += program * 2 * HALF
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HALF
    first = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    second = tl.load(x_ptr + HALF + offsets, mask=mask).to(tl.float32)
    _store_rotated(first, -second, cos_ptr + offsets, sin_ptr + offsets, y_ptr + offsets, mask)
    offsets += HALF
    _store_rotated(second, first, cos_ptr + offsets, sin_ptr + offsets, y_ptr + offsets, mask)


@triton.jit
def _store_rotated(x, partner, cos_ptr, sin_ptr, y_ptr, mask):  # type: ignore[no-untyped-def]
    dtype = y_ptr.dtype.element_ty
    by_cos = x * tl.load(cos_ptr, mask=mask).to(tl.float32)
    by_sin = partner * tl.load(sin_ptr, mask=mask).to(tl.float32)
    tl.store(y_ptr, (by_cos.to(dtype).to(tl.float32) + by_sin.to(dtype).to(tl.float32)).to(dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_gate(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_row_stride,
    up_row_stride,
    size,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * size + offsets, (activated * up).to(y_ptr.dtype.element_ty), mask=offsets < size)
