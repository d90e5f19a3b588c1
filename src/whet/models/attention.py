"""Self-attention layers: grouped-query attention and multi-head latent attention."""

import torch
from torch import nn

from whet.models.kv_cache import KeyValueCache
from whet.models.norms import make_norm
from whet.models.rope import Rotation, apply_rope
from whet.models.spec import AttentionSpec, LatentAttentionSpec, NormSpec
from whet.ops.attention import Layout, attend
from whet.ops.dispatch import current_paths
from whet.ops.linear import Linear, project_all


class SelfAttention(nn.Module):
    """Grouped-query attention, with optional QK norms and RoPE."""

    def __init__(self, spec: AttentionSpec, *, d_model: int, layer: int, norm: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.paths = current_paths()
        self.sizes = [spec.heads * spec.head_dim, *(2 * [spec.kv_heads * spec.head_dim])]
        if spec.fused:
            self.qkv_proj = Linear(d_model, sum(self.sizes), bias=spec.bias)
        else:
            self.q_proj = Linear(d_model, self.sizes[0], bias=spec.bias)
            self.k_proj = Linear(d_model, self.sizes[1], bias=spec.bias)
            self.v_proj = Linear(d_model, self.sizes[2], bias=spec.bias)
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = make_norm(norm, spec.head_dim if per_head else self.sizes[0])
            self.k_norm = make_norm(norm, spec.head_dim if per_head else self.sizes[1])
        self.o_proj = Linear(self.sizes[0], d_model, bias=spec.out_bias)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over x [B, T, d_model] and the cached keys and values."""
        queries, keys, values = self.project(x)
        if rotation is not None:
            queries, keys = (apply_rope(tensor, *rotation, self.paths) for tensor in (queries, keys))
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)
        return self.o_proj(
            self.compute_attention(queries, keys, values, layout, slopes).transpose(1, 2).flatten(2)
        )

    def compute_attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: Layout,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention output [B, heads, queries, D] for values [B, kv_heads, keys, D]."""
        window, scale, softcap = self.spec.window, self.spec.scale, self.spec.softcap
        return attend(
            queries,
            keys,
            values,
            layout,
            window=window,
            scale=scale,
            softcap=softcap,
            slopes=slopes,
            paths=self.paths,
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as [B, heads, T, head_dim]."""
        if self.spec.fused:
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        else:
            q, k, v = project_all(x, self.q_proj, self.k_proj, self.v_proj)
        if self.spec.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class LatentAttention(nn.Module):
    """Multi-head latent attention, with the module names of DeepSeek."""

    def __init__(self, spec: LatentAttentionSpec, *, d_model: int, layer: int, norm: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.paths = current_paths()
        query_size = spec.heads * (spec.plain_dim + spec.rope_dim)
        if spec.q_rank is None:
            self.q_proj = Linear(d_model, query_size, bias=False)
        else:
            self.q_a_proj = Linear(d_model, spec.q_rank, bias=False)
            self.q_a_layernorm = make_norm(norm, spec.q_rank)
            self.q_b_proj = Linear(spec.q_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = Linear(d_model, spec.kv_rank + spec.rope_dim, bias=False)
        self.kv_a_layernorm = make_norm(norm, spec.kv_rank)
        self.kv_b_proj = Linear(spec.kv_rank, spec.heads * (spec.plain_dim + spec.value_dim), bias=False)
        self.o_proj = Linear(spec.heads * spec.value_dim, d_model, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over x [B, T, d_model] and the cached keys and values."""
        spec = self.spec
        assert rotation is not None  # latent attention always uses RoPE
        queries = self._queries(x).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        plain, rotary = queries.split((spec.plain_dim, spec.rope_dim), dim=-1)
        queries = torch.cat((plain, apply_rope(rotary, *rotation, self.paths)), dim=-1)
        latent, rope_key = self.kv_a_proj_with_mqa(x)[:, None].split((spec.kv_rank, spec.rope_dim), dim=-1)
        # both [B, 1, T, channels]
        latent, rope_key = self.kv_a_layernorm(latent), apply_rope(rope_key, *rotation, self.paths)
        if cache is not None:
            latent, rope_key = cache.update(self.layer, latent, rope_key)
        keys, values = (
            self.kv_b_proj(latent[:, 0])
            .unflatten(-1, (spec.heads, -1))
            .transpose(1, 2)
            .split((spec.plain_dim, spec.value_dim), dim=-1)
        )
        keys = torch.cat((keys, rope_key.expand(-1, spec.heads, -1, -1)), dim=-1)
        return self.o_proj(
            self.compute_attention(queries, keys, values, layout, slopes).transpose(1, 2).flatten(2)
        )

    def compute_attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: Layout,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention output [B, heads, queries, D] for values [B, heads, keys, D]."""
        return attend(queries, keys, values, layout, window=self.spec.window, slopes=slopes, paths=self.paths)

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.q_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def make_attention(
    spec: AttentionSpec | LatentAttentionSpec, *, d_model: int, layer: int, norm: NormSpec
) -> nn.Module:
    """Return the attention layer described by a spec."""
    layer_class = LatentAttention if isinstance(spec, LatentAttentionSpec) else SelfAttention
    return layer_class(spec, d_model=d_model, layer=layer, norm=norm)  # type: ignore[arg-type]  # chosen by its type
