"""DoRA (arXiv 2402.09353): a trained length for each row of the weight; LoRA turns the row."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.adapters.adapter import LoRASettings, StoredLayer
from whet.adapters.fused_lora import Operands
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.nf4 import NF4Linear


class DoRALinear(LoRALinear):
    """y = m / |W + s B A| * (x W' + s x A' B') + bias; the norm, of each row, passes no gradient on."""

    base_square: torch.Tensor

    def __init__(self, base: nn.Linear | NF4Linear, settings: LoRASettings) -> None:
        super().__init__(base, settings)
        norm = torch.linalg.vector_norm(base.weight.detach(), dim=1, dtype=torch.float32)
        self.lora_magnitude_vector = nn.Parameter(norm)
        self.register_buffer("base_square", norm.square(), persistent=False)

    def operands(self) -> Operands:
        """Without the bias, which the lengths do not scale, and with the scale in A.

        The compiler cannot follow one number into the product and into the norm.
        """
        return super().operands()._replace(bias=None, a=self.scale * self.lora_A, scale=1.0)

    def finished(self, product: torch.Tensor) -> torch.Tensor:
        """Each output scaled to its length, which is not rounded: it changes by little."""
        y = product * self._gain()
        return (y if self.base.bias is None else y + self.base.bias).to(product.dtype)

    def with_dropout(self, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """PEFT's: what the lengths change also reads the input after dropout."""
        gain, operands, y = self._gain(), self.operands(), self.base(x)
        update = F.linear(F.linear(dropped, operands.a.to(dropped.dtype)), operands.b.to(dropped.dtype))
        return (y + update * gain + (gain - 1) * F.linear(dropped, self.base.weight)).to(y.dtype)

    def _gain(self) -> torch.Tensor:
        """m / |W + s B A|, from products that are as small as A and B: no second matrix of W's size."""
        return self.lora_magnitude_vector / self.once("norm", self._norm)

    def _norm(self) -> torch.Tensor:
        with torch.no_grad():
            weight = self.base.weight
            if not self.paths.fused_lora:
                return torch.linalg.vector_norm(weight.float() + self.delta(), dim=1).clamp(min=1e-15)
            a, b = self.scale * self.lora_A.float(), self.lora_B.float()
            across = (weight @ a.to(weight.dtype).T).float()  # [out, rank]: s W A'
            square = self.base_square.float() + ((2 * across + b @ (a @ a.T)) * b).sum(1)
            return square.clamp(min=1e-30).sqrt()

    def merged_weight(self) -> torch.Tensor:
        """The rows of W + s B A at their trained lengths, computed in float32."""
        whole = self.base.weight.float() + self.delta()
        norm = torch.linalg.vector_norm(whole, dim=1, keepdim=True).detach().clamp(min=1e-15)
        return (whole * (self.lora_magnitude_vector.float()[:, None] / norm)).to(self.base.weight.dtype)

    def stored_layer(self) -> StoredLayer:
        """With the lengths."""
        return super().stored_layer()._replace(magnitude=self.lora_magnitude_vector)
