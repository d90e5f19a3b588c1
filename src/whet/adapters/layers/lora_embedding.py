"""LoRA on the token embedding, as in PEFT: E[tokens] + scale * A'[tokens] B'."""

import torch
import torch.nn.functional as F
from torch import nn

from whet.adapters.adapter import Adapter, LoRASettings, StoredLayer, StoredModule


class LoRAEmbedding(Adapter):
    """A frozen embedding and its low-rank update, a linear layer whose input is one-hot."""

    base: nn.Embedding

    def __init__(self, base: nn.Embedding, settings: LoRASettings) -> None:
        super().__init__(base)
        self.settings = settings
        self.scale = settings.scale
        device = base.weight.device
        self.lora_embedding_A = nn.Parameter(torch.zeros(settings.rank, base.num_embeddings, device=device))
        self.lora_embedding_B = nn.Parameter(torch.randn(base.embedding_dim, settings.rank, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the base, plus the update if it is enabled."""
        rows = self.base(tokens)
        if not self.enabled:
            return rows
        update = F.linear(F.embedding(tokens, self.lora_embedding_A.T), self.lora_embedding_B) * self.scale
        factor = getattr(self.base, "embed_scale", None)  # transformers' scaled embeddings
        if factor is not None:
            update = update * factor
        return rows + update.to(rows.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The embedding table in use, merged if the adapter is enabled."""
        return self.merged()["weight"] if self.enabled else self.base.weight

    @property
    def in_features(self) -> int:
        """Size of the vocabulary."""
        return self.base.num_embeddings

    @property
    def out_features(self) -> int:
        """Size of an embedding."""
        return self.base.embedding_dim

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the table of a plain embedding with the same outputs."""
        update = (self.lora_embedding_B.float() @ self.lora_embedding_A.float()).T * self.scale
        return {"weight": (self.base.weight.float() + update).to(self.base.weight.dtype)}

    def stored(self) -> StoredModule:
        """Return the stored form of this adapter."""
        a, b = self.lora_embedding_A, self.lora_embedding_B
        return StoredModule.from_layer(StoredLayer(self.settings, a, b, embedding=True))
