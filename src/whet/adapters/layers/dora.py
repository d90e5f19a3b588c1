"""DoRA (arXiv 2402.09353): a trained magnitude per row of the weight, while LoRA updates its direction."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.adapters.adapter import LoRASettings, StoredLayer
from whet.adapters.fused_lora import Operands
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.nf4 import NF4Linear


class DoRALinear(LoRALinear):
    """y = m / |W + s B A| * (x W' + s x A' B') + bias, with row norms that are excluded from the gradient."""

    base_square: torch.Tensor

    def __init__(self, base: nn.Linear | NF4Linear, settings: LoRASettings) -> None:
        super().__init__(base, settings)
        norm = torch.linalg.vector_norm(base.weight.detach(), dim=1, dtype=torch.float32)
        self.lora_magnitude_vector = nn.Parameter(norm)
        self.register_buffer("base_square", norm.square(), persistent=False)

    def operands(self) -> Operands:
        """Return the operands without the bias, which the magnitudes do not scale, and with the scale in A.

        The compiler cannot trace a scale that both the matmul and the norm use.
        """
        return super().operands()._replace(bias=None, a=self.scale * self.lora_A, scale=1.0)

    def finish_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output scaled by m / |W + s B A|, plus the bias.

        The scale stays in float32, because rounding would discard its small changes.
        """
        y = output * self._gain()
        return (y if self.base.bias is None else y + self.base.bias).to(output.dtype)

    def forward_with_dropout(self, x: torch.Tensor, update_input: torch.Tensor) -> torch.Tensor:
        """Return the output with dropout as in PEFT, which also drops inputs of the magnitude's change."""
        gain, operands, y = self._gain(), self.operands(), self.base(x)
        low = F.linear(update_input, operands.a.to(update_input.dtype))
        update = F.linear(low, operands.b.to(update_input.dtype))
        return (y + update * gain + (gain - 1) * F.linear(update_input, self.base.weight)).to(y.dtype)

    def _gain(self) -> torch.Tensor:
        """Return m / |W + s B A| [out], without a second matrix of W's size."""
        return self.lora_magnitude_vector / self.cached("norm", self._norm)

    def _norm(self) -> torch.Tensor:
        with torch.no_grad():
            weight = self.base.weight
            if not self.paths.fused_lora:
                return torch.linalg.vector_norm(weight.float() + self.delta_weight(), dim=1).clamp(min=1e-15)
            a, b = self.scale * self.lora_A.float(), self.lora_B.float()
            cross = (weight @ a.to(weight.dtype).T).float()  # [out, rank]: s W A'
            square = self.base_square.float() + ((2 * cross + b @ (a @ a.T)) * b).sum(1)
            return square.clamp(min=1e-30).sqrt()

    def merged_weight(self) -> torch.Tensor:
        """Return the rows of W + s B A rescaled to their trained magnitudes, computed in float32."""
        updated = self.base.weight.float() + self.delta_weight()
        norm = torch.linalg.vector_norm(updated, dim=1, keepdim=True).detach().clamp(min=1e-15)
        return (updated * (self.lora_magnitude_vector.float()[:, None] / norm)).to(self.base.weight.dtype)

    def stored_layer(self) -> StoredLayer:
        """Return the low-rank update and the magnitude vector."""
        return super().stored_layer()._replace(magnitude=self.lora_magnitude_vector)
