"""4-bit base weights: NF4 with double quantisation (arXiv 2305.14314), in bitsandbytes' numbers and layout.

A block of 64 values has one scale, its largest magnitude, and each value is one of 16 codes, two to a byte,
the first in the high half. The scales, less their mean, are themselves 8-bit codes, in blocks of 256: 4.13
bits a weight. bitsandbytes unpacks them where it is installed; torch alone gives the same numbers.
"""

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.dispatch import FAST, Paths, chosen_paths

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
def bitsandbytes() -> ModuleType | None:
    """bitsandbytes' functions, where it can be imported."""
    try:
        import bitsandbytes.functional
    except ImportError:
        return None
    return bitsandbytes.functional


@functools.cache
def code_table(kind: str, device: torch.device) -> torch.Tensor:
    """What codes mean, on a device: `values`, codes of `scales`, or the middles between either's."""
    if kind == "values":
        return torch.tensor(CODES, device=device)
    if kind == "scales":
        # dynamic exponents (arXiv 2110.02861): each decade below 1 has half the values of the one above it
        tenths = [torch.linspace(0.1, 1, 2**e + 1) for e in range(7)]
        steps = torch.cat([10 ** (e - 6) * ((t[:-1] + t[1:]) / 2) for e, t in enumerate(tenths)])
        return torch.cat([-steps, steps, torch.tensor([0.0, 1.0])]).sort().values.to(device)
    table = code_table(kind.removeprefix("middles of "), device)
    return (table[:-1] + table[1:]) / 2


def _nearest(blocks: torch.Tensor, largest: torch.Tensor, kind: str) -> torch.Tensor:
    """The code of each value, relative to the largest of its block."""
    relative = blocks * (1 / largest.clamp(min=1e-38))[:, None]  # as bitsandbytes rounds it
    return torch.bucketize(relative, code_table(f"middles of {kind}", blocks.device)).to(torch.uint8)


def _blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that stand for a weight: packed codes, codes of their scales, and those codes' scales.

    Always by torch: of two equal weights bitsandbytes' CPU kernel may give one a scale's second nearest code.
    """
    if weight.is_meta:
        return _unfilled(weight.numel())
    blocks = _blocks(weight.float().flatten(), BLOCK)
    largest = blocks.abs().amax(1)
    values = _nearest(blocks, largest, "values").view(-1, 2)
    codes = ((values[:, 0] << 4) | values[:, 1])[: -(-weight.numel() // 2)]
    mean = largest.mean()
    centred = _blocks(largest - mean, SCALES_BLOCK)
    top = centred.abs().amax(1)
    scales = _nearest(centred, top, "scales").flatten()[: largest.numel()]
    # as integers: `model.to(torch.bfloat16)` must not round them
    rest = torch.cat([top, mean.view(1)]).view(torch.int32)
    return {"codes": codes, "scales": scales, "rest": rest}


def _unfilled(count: int) -> dict[str, torch.Tensor]:
    """What stands for so many weights, on the meta device: their sizes, quickly."""
    scales = -(-count // BLOCK)
    return {
        "codes": torch.empty(-(-count // 2), dtype=torch.uint8, device="meta"),
        "scales": torch.empty(scales, dtype=torch.uint8, device="meta"),
        "rest": torch.empty(-(-scales // SCALES_BLOCK) + 1, dtype=torch.int32, device="meta"),
    }


def dequantise(
    packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, paths: Paths = FAST
) -> torch.Tensor:
    """The weight again."""
    codes, rest = packed["codes"], packed["rest"].view(torch.float32)
    centred = _blocks(code_table("scales", codes.device)[packed["scales"].int()], SCALES_BLOCK)
    scales = (centred * rest[:-1, None]).flatten()[: packed["scales"].numel()] + rest[-1]
    if paths.quantised and bitsandbytes() is not None and shape[0] * shape[1] % BLOCK == 0:
        kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        # a row a block: its CPU kernel goes wrong where blocks begin inside of rows
        return kernel(codes[:, None], scales, BLOCK, "nf4", (scales.numel(), BLOCK), dtype).view(shape)
    halves = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
    values = _blocks(code_table("values", codes.device)[halves.int()], BLOCK) * scales[:, None]
    return values.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


class NF4Linear(nn.Module):
    """A frozen linear layer in 4 bits; its weight exists only while it is used."""

    codes: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor

    def __init__(self, linear: nn.Linear, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = dtype  # of the computation
        self.paths = chosen_paths()
        for name, tensor in quantise(linear.weight.detach().to(device)).items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is computed with."""
        packed = {"codes": self.codes, "scales": self.scales, "rest": self.rest}
        return dequantise(packed, (self.out_features, self.in_features), self.dtype, self.paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer."""
        if not self.paths.quantised:
            with torch.autocast(x.device.type, enabled=False):
                y = F.linear(x.to(self.dtype), self.weight)
        else:
            y = _FrozenLinear.apply(x, self)
        return y if self.bias is None else y + self.bias

    def merged(self) -> dict[str, torch.Tensor]:
        """Weight and bias of a plain layer that computes the same."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def to_linear(self) -> nn.Linear:
        """A plain layer with the weight that this one computes with."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias
        return linear


class _FrozenLinear(torch.autograd.Function):
    """x W' that makes W again for its gradient: keeping it would undo the quantisation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NF4Linear) -> torch.Tensor:  # Any: autograd's context
        ctx.layer, ctx.dtype = layer, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(layer.dtype), layer.weight)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        with torch.autocast(upstream.device.type, enabled=False):
            return (upstream @ ctx.layer.weight).to(ctx.dtype), None
