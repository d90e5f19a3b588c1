"""PiSSA (arXiv 2404.02948): A and B start as the largest singular directions of the weight."""

from dataclasses import replace

import torch
from torch import nn

from whet.adapters.adapter import LoRASettings, StoredLayer
from whet.adapters.fused_lora import Operands
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.nf4 import NF4Linear


class PiSSALinear(LoRALinear):
    """y = x W' + s (x A' B' - x A0' B0'), where A0 and B0 are the initial values of A and B.

    The paper subtracts s B0 A0 from W. Here W stays unchanged, so the base model remains available and
    nothing is rounded. The update is equivalent to a plain LoRA of twice the rank, and is saved as one.
    """

    first_A: torch.Tensor  # noqa: N815 - the paper's letters
    first_B: torch.Tensor  # noqa: N815

    def __init__(self, base: nn.Linear | NF4Linear, settings: LoRASettings) -> None:
        super().__init__(base, settings)
        left, values, right = torch.linalg.svd(base.weight.detach().float(), full_matrices=False)
        root = (values[: settings.rank] / self.scale).sqrt()
        self.register_buffer("first_A", root[:, None] * right[: settings.rank])
        self.register_buffer("first_B", left[:, : settings.rank] * root)
        self.lora_A.data.copy_(self.first_A)
        self.lora_B.data.copy_(self.first_B)

    def operands(self) -> Operands:
        """Return the operands of the equivalent update x (A - A0)' B' + x A0' (B - B0)'.

        The differences are small compared to A and B, so rounding A and B to 16 bits would lose most of them.
        """
        a = torch.cat([self.lora_A - self.first_A, self.first_A])
        b = torch.cat([self.lora_B, self.lora_B - self.first_B], dim=1)
        return super().operands()._replace(a=a, b=b)

    def stored_layer(self) -> StoredLayer:
        """Return the equivalent plain LoRA of twice the rank, at the same scale."""
        operands, rank = self.operands(), 2 * self.settings.rank
        plain = replace(self.settings, variant="lora", rank=rank, alpha=self.scale * rank)
        return StoredLayer(plain, operands.a, operands.b)
