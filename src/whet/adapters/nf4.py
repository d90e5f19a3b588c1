"""4-bit base weights: NF4 with double quantization (arXiv 2305.14314), in the layout of bitsandbytes.

Each block of 64 values has one scale, its largest magnitude. Each value is one of 16 codes, packed two per
byte with the first in the high half. The scales, minus their mean, are themselves quantized to 8-bit codes
in blocks of 256, which gives 4.13 bits per weight. bitsandbytes dequantizes if it is installed. Plain torch
gives the same values.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.dispatch import FAST, Paths, current_paths

BLOCK = 64
SCALES_BLOCK = 256
# quantiles of a normal distribution, scaled to [-1, 1]; the paper's appendix E
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


@functools.cache
def bitsandbytes_functional() -> ModuleType | None:
    """Return the module bitsandbytes.functional, or None if bitsandbytes cannot be imported."""
    # on some CPUs it warns that an optional kernel is missing, which whet does not use
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = backend.level
    backend.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional
    except ImportError:
        return None
    finally:
        backend.setLevel(level)
    return bitsandbytes.functional


@functools.cache
def code_table(kind: str, device: torch.device) -> torch.Tensor:
    """Return a table that maps codes to floats, on a device.

    `kind` is "values" (the 16 codes of weights), "scales" (the 256 codes of scales), or "middles of values"
    and "middles of scales": the midpoints between neighboring entries, which bound the codes.
    """
    if kind == "values":
        return torch.tensor(CODES, device=device)
    if kind == "scales":
        # dynamic exponents (arXiv 2110.02861): each decade below 1 has half the values of the one above it
        tenths = [torch.linspace(0.1, 1, 2**e + 1) for e in range(7)]
        steps = torch.cat([10 ** (e - 6) * ((t[:-1] + t[1:]) / 2) for e, t in enumerate(tenths)])
        return torch.cat([-steps, steps, torch.tensor([0.0, 1.0])]).sort().values.to(device)
    table = code_table(kind.removeprefix("middles of "), device)
    return (table[:-1] + table[1:]) / 2


def _nearest_codes(blocks: torch.Tensor, largest: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the code nearest to each value divided by the largest magnitude of its block."""
    relative = blocks * (1 / largest.clamp(min=1e-38))[:, None]  # as bitsandbytes rounds it
    return torch.bucketize(relative, code_table(f"middles of {kind}", blocks.device)).to(torch.uint8)


def _blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def quantize_nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the NF4 form of a weight.

    "codes" has the packed 4-bit codes, "scales" the 8-bit codes of the block scales, and "rest" the float32
    scales of those codes followed by their mean, viewed as int32. Plain torch computes all of it, because
    the CPU kernel of bitsandbytes may round the scales of equal weights to different codes.
    """
    if weight.is_meta:
        return _empty_on_meta(weight.numel())
    blocks = _blocks(weight.float().flatten(), BLOCK)
    largest = blocks.abs().amax(1)
    values = _nearest_codes(blocks, largest, "values").view(-1, 2)
    codes = ((values[:, 0] << 4) | values[:, 1])[: -(-weight.numel() // 2)]
    mean = largest.mean()
    centered = _blocks(largest - mean, SCALES_BLOCK)
    top = centered.abs().amax(1)
    scales = _nearest_codes(centered, top, "scales").flatten()[: largest.numel()]
    # viewed as integers, so that `model.to(torch.bfloat16)` does not round them
    rest = torch.cat([top, mean.view(1)]).view(torch.int32)
    return {"codes": codes, "scales": scales, "rest": rest}


def _empty_on_meta(count: int) -> dict[str, torch.Tensor]:
    """Return the NF4 form of `count` weights on the meta device."""
    scales = -(-count // BLOCK)
    return {
        "codes": torch.empty(-(-count // 2), dtype=torch.uint8, device="meta"),
        "scales": torch.empty(scales, dtype=torch.uint8, device="meta"),
        "rest": torch.empty(-(-scales // SCALES_BLOCK) + 1, dtype=torch.int32, device="meta"),
    }


def dequantize_nf4(
    packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, paths: Paths = FAST
) -> torch.Tensor:
    """Return the weight of this shape, in `dtype`, from the output of `quantize_nf4`."""
    codes, rest = packed["codes"], packed["rest"].view(torch.float32)
    centered = _blocks(code_table("scales", codes.device)[packed["scales"].int()], SCALES_BLOCK)
    scales = (centered * rest[:-1, None]).flatten()[: packed["scales"].numel()] + rest[-1]
    if paths.quantized and bitsandbytes_functional() is not None and shape[0] * shape[1] % BLOCK == 0:
        kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        # one row per block, because the CPU kernel is wrong if a block starts inside a row
        return kernel(codes[:, None], scales, BLOCK, "nf4", (scales.numel(), BLOCK), dtype).view(shape)
    halves = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
    values = _blocks(code_table("values", codes.device)[halves.int()], BLOCK) * scales[:, None]
    return values.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


class NF4Linear(nn.Module):
    """A frozen linear layer in NF4. Its weight is dequantized on each use and not stored."""

    codes: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor

    def __init__(self, linear: nn.Linear, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = dtype  # the compute dtype
        self.paths = current_paths()
        for name, tensor in quantize_nf4(linear.weight.detach().to(device)).items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight [out, in], in the compute dtype."""
        packed = {"codes": self.codes, "scales": self.scales, "rest": self.rest}
        return dequantize_nf4(packed, (self.out_features, self.in_features), self.dtype, self.paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W' + bias with the dequantized weight."""
        if not self.paths.quantized:
            with torch.autocast(x.device.type, enabled=False):
                y = F.linear(x.to(self.dtype), self.weight)
        else:
            y = _FrozenLinear.apply(x, self)
        return y if self.bias is None else y + self.bias

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the weight and bias of a plain layer with the same outputs."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def to_linear(self) -> nn.Linear:
        """Return a plain linear layer with the dequantized weight."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias
        return linear


class _FrozenLinear(torch.autograd.Function):
    """x W' that dequantizes W again in the backward pass, because saving it would need the full memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NF4Linear) -> torch.Tensor:  # Any: autograd's context
        ctx.layer, ctx.dtype = layer, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(layer.dtype), layer.weight)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        with torch.autocast(upstream.device.type, enabled=False):
            return (upstream @ ctx.layer.weight).to(ctx.dtype), None


def quantized_size(model: nn.Module) -> tuple[int, int]:
    """Return the number of weights in 4 bits, and the bytes of their codes and scales."""
    layers = [module for module in model.modules() if isinstance(module, NF4Linear)]
    size = sum(b.numel() * b.element_size() for layer in layers for b in layer.buffers())
    return sum(layer.in_features * layer.out_features for layer in layers), size
