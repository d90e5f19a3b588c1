"""Self-attention with grouped key/value heads."""

import torch
from torch import nn

from whet.models.cache import KeyValueCache
from whet.models.norms import make_norm
from whet.models.rope import rotate
from whet.models.spec import AttentionSpec, NormSpec
from whet.ops.attention import Layout, attend

Rotation = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(nn.Module):
    """Project, normalise and rotate where the spec says so, attend, project back."""

    def __init__(self, spec: AttentionSpec, *, d_model: int, layer: int, norm: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.sizes = [spec.heads * spec.head_dim, *(2 * [spec.kv_heads * spec.head_dim])]
        if spec.fused:
            self.qkv_proj = nn.Linear(d_model, sum(self.sizes), bias=spec.bias)
        else:
            self.q_proj = nn.Linear(d_model, self.sizes[0], bias=spec.bias)
            self.k_proj = nn.Linear(d_model, self.sizes[1], bias=spec.bias)
            self.v_proj = nn.Linear(d_model, self.sizes[2], bias=spec.bias)
        if spec.qk_norm != "none":
            each = spec.qk_norm == "head"
            self.q_norm = make_norm(norm, spec.head_dim if each else self.sizes[0])
            self.k_norm = make_norm(norm, spec.head_dim if each else self.sizes[1])
        self.o_proj = nn.Linear(self.sizes[0], d_model, bias=spec.out_bias)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over x [B, T, d_model], and over what the cache holds."""
        spec = self.spec
        queries, keys, values = self._project(x)
        if rotation is not None:
            queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)
        mixed = attend(
            queries,
            keys,
            values,
            layout,
            window=spec.window,
            scale=spec.scale,
            softcap=spec.softcap,
            slopes=slopes,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as [B, heads, T, head_dim]."""
        if self.spec.fused:
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.spec.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
