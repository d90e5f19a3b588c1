"""Self-attention with grouped key/value heads."""

import torch
from torch import nn

from whet.models.cache import KeyValueCache
from whet.models.rope import rotate
from whet.models.spec import AttentionSpec
from whet.ops.attention import Layout, attend


class SelfAttention(nn.Module):
    """Project, rotate, attend, project back."""

    def __init__(self, spec: AttentionSpec, *, d_model: int, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.q_proj = nn.Linear(d_model, spec.heads * spec.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(d_model, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(d_model, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, d_model, bias=spec.bias)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        layout: Layout,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Attend over x [B, T, d_model], and over what the cache holds."""
        batch, length, _ = x.shape
        cos, sin = rotation
        queries = self._heads(self.q_proj(x), self.spec.heads)
        keys = self._heads(self.k_proj(x), self.spec.kv_heads)
        values = self._heads(self.v_proj(x), self.spec.kv_heads)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)
        mixed = attend(queries, keys, values, layout)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.spec.head_dim)).transpose(1, 2)
