"""Normalization layers."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.spec import NormSpec
from whet.ops.dispatch import current_paths
from whet.ops.kernels import cpu_autograd, fused_decode


class RMSNorm(nn.Module):
    """RMSNorm, x / rms(x) * weight, with the mean square in float32 or wider."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.paths = current_paths()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x over its last dimension."""
        if self.paths.explicit_backward and cpu_autograd.is_supported(x, self.weight):
            return cpu_autograd.rms_norm(x, self.weight, self.eps)
        if self.paths.decoding and fused_decode.is_supported(x, self.weight):
            return fused_decode.rms_norm(x, self.weight, self.eps)
        return self._normalize(x).to(x.dtype) * self.weight.to(x.dtype)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMSNorm: the factor is 1 + weight, applied before rounding to the input dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x over its last dimension."""
        if self.paths.explicit_backward and cpu_autograd.is_supported(x, self.weight):
            return cpu_autograd.rms_norm(x, 1 + self.weight, self.eps)
        if self.paths.decoding and fused_decode.is_supported(x, self.weight):
            return fused_decode.rms_norm(x, self.weight, self.eps, offset=True)
        normalized = self._normalize(x)
        return (normalized * (1 + self.weight.to(normalized.dtype))).to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias, cast to the input dtype."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x over its last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(spec: NormSpec, size: int) -> nn.Module:
    """Return the norm described by a spec."""
    if spec.kind == "none":
        return nn.Identity()
    if spec.kind == "layer":
        return LayerNorm(size, eps=spec.eps)
    return OffsetRMSNorm(size, eps=spec.eps) if spec.offset else RMSNorm(size, eps=spec.eps)
