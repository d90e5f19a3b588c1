"""The feed-forward layer, with or without a gate."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.spec import FeedForwardSpec
from whet.ops.dispatch import current_paths
from whet.ops.kernels import cpu_autograd, fused_decode
from whet.ops.linear import Linear, fused_swiglu, project_all

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """A feed-forward layer: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, spec: FeedForwardSpec, *, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.paths = current_paths()
        self.activation = ACTIVATIONS[spec.activation]
        if spec.gated and spec.fused:
            self.gate_up_proj = Linear(d_model, 2 * spec.width, bias=spec.bias)
        else:
            if spec.gated:
                self.gate_proj = Linear(d_model, spec.width, bias=spec.bias)
            self.up_proj = Linear(d_model, spec.width, bias=spec.bias)
        self.down_proj = Linear(spec.width, d_model, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position of x [..., d_model] independently."""
        if not self.spec.gated:
            return self.down_proj(self.activation(self.up_proj(x)))
        if self.spec.activation == "silu" and not self.spec.fused:
            output = fused_swiglu(x, self.gate_proj, self.up_proj, self.down_proj)
            if output is not None:
                return output
        if self.spec.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = project_all(x, self.gate_proj, self.up_proj)
        silu = self.spec.activation == "silu"
        if silu and self.paths.explicit_backward and cpu_autograd.is_supported(gate, up):
            return self.down_proj(cpu_autograd.silu_gate(gate, up))
        if silu and self.paths.decoding and fused_decode.is_supported(gate, up):
            return self.down_proj(fused_decode.silu_gate(gate, up))
        return self.down_proj(self.activation(gate) * up)
