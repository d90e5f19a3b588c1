"""The decoder class of all native families, built from a ModelSpec."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.models.attention import make_attention
from whet.models.families import FAMILIES, is_transposed, spec_to_config, stored_tensor_names
from whet.models.families.moe import split_parts
from whet.models.kv_cache import KeyValueCache
from whet.models.language_model import LanguageModel
from whet.models.moe import make_feedforward
from whet.models.norms import make_norm
from whet.models.prefix_sharing import share_prefixes
from whet.models.rope import Rotation, alibi_slopes_by_heads, rope_tables, sinusoids
from whet.models.spec import BlockSpec, ModelSpec, RopeSpec
from whet.ops.attention import Layout
from whet.ops.dispatch import is_planning
from whet.ops.linear import Linear
from whet.ops.lm_head import Head

# before and after attention, before and after the feed-forward layer, by placement
_NORM_NAMES = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class Block(nn.Module):
    """One transformer layer. Norm names follow the Hugging Face families with the same norm placement."""

    def __init__(self, block: BlockSpec, *, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        before_attention, after_attention, before_mlp, after_mlp = _NORM_NAMES[block.placement]
        self._attention_norms = self._mlp_norms = None
        if block.attention is not None:
            self._attention_norms = (before_attention, after_attention)
            self.self_attn = make_attention(
                block.attention, d_model=spec.d_model, layer=layer, norm=spec.norm
            )
        if block.feedforward is not None:
            self._mlp_norms = (before_mlp, after_mlp)
            self.mlp = make_feedforward(block.feedforward, d_model=spec.d_model)
        for name in filter(None, (*(self._attention_norms or ()), *(self._mlp_norms or ()))):
            self.add_module(name, make_norm(spec.norm, spec.d_model))

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply attention and the feed-forward layer, each added to the residual stream."""
        if self._attention_norms is not None:
            before, after = self._attention_norms
            mixed = self.self_attn(self._norm(before, x), rotation, layout, cache, slopes)
            x = x + self._norm(after, mixed)
        if self._mlp_norms is not None:
            before, after = self._mlp_norms
            x = x + self._norm(after, self.mlp(self._norm(before, x)))
        return x

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, name)(x) if name else x


def _has_forward_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks, other than those of FSDP, which do not read activations."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks)


class Decoder(LanguageModel):
    """A causal language model. Module names are those of Hugging Face's llama without the `model.` prefix."""

    def __init__(self, spec: ModelSpec, *, source_config: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        if spec.positions == "learned":
            self.embed_positions = nn.Embedding(spec.max_positions, spec.d_model)
        self.layers = nn.ModuleList(
            Block(block, spec=spec, layer=layer) for layer, block in enumerate(spec.blocks)
        )
        self.norm = make_norm(spec.norm, spec.d_model)
        if not spec.tied_head:
            self.lm_head = Linear(spec.d_model, spec.vocab_size, bias=False)
        self.grad_checkpoint = False
        self._frequencies: dict[tuple[torch.device, RopeSpec, int], torch.Tensor] = {}
        self._alibi: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
        self._source_config = dict(source_config or {})  # token ids and other fields to save again

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states [B, T, d_model] of tokens [B, T]."""
        layout = layout or Layout()
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        shared = None
        if self.paths.shared_prefixes and tokens.device.type == "cpu" and cache is None and not is_planning():
            shared = share_prefixes(tokens, positions, layout)
        if shared is None or not self.can_share_prefixes():
            return self._hidden(tokens, positions, layout, cache)
        states = self._hidden(tokens[:, shared.computed], positions[:, shared.computed], shared.layout, None)
        return states.index_select(1, shared.sources)

    def can_share_prefixes(self) -> bool:
        """Whether equal prefixes may be computed once: no dropout, no expert counts and no forward hooks."""
        return not self.spec.expert_specs and not any(
            _has_forward_hooks(module) or getattr(module, "has_active_dropout", False)
            for module in self.modules()
        )

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: Layout, cache: KeyValueCache | None
    ) -> torch.Tensor:
        x = self._embed(tokens, positions)
        if self.input_requires_grad and torch.is_grad_enabled():
            x.requires_grad_()
        tables = rope_tables(self.spec.attention_specs, positions, dtype=x.dtype, cache=self._frequencies)
        slopes = alibi_slopes_by_heads(self.spec, x, cache=self._alibi)
        recompute = self.grad_checkpoint and cache is None and torch.is_grad_enabled()
        for layer, block in zip(self.layers, self.spec.blocks, strict=True):
            rotation, layer_slopes = None, None
            if block.attention is not None:
                rotation = tables.get((block.attention.rope, block.attention.rotary_dim))
                layer_slopes = slopes.get(block.attention.heads)
            if recompute:
                x = checkpoint(layer, x, rotation, layout, None, layer_slopes, use_reentrant=False)
            else:
                x = layer(x, rotation, layout, cache, layer_slopes)
        return self.norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B, T, d_model] of tokens [B, T], without positions."""
        x: torch.Tensor = self.embed_tokens(tokens)
        if self.spec.embedding_scale != 1.0:
            # round the factor to the dtype first, as in the training of the families that use it
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype, device="cpu").item()
        return x

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.spec.positions == "learned":
            x = x + self.embed_positions(positions)
        elif self.spec.positions == "sinusoidal":
            x = x + sinusoids(positions, self.spec.d_model).to(x.dtype)
        return x

    def head(self) -> Head:
        """Return the output head."""
        weight = self.embed_tokens.weight if self.spec.tied_head else self.lm_head.weight
        return Head(weight, scale=self.spec.logit_scale, softcap=self.spec.logit_softcap, paths=self.paths)

    def new_cache(self, capacity: int = 0) -> KeyValueCache:
        """Return an empty key/value cache for this model."""
        return KeyValueCache(len(self.layers), capacity)

    def blocks(self) -> Iterable[nn.Module]:
        """Return the layers in order."""
        return self.layers

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of one of this model's parameters or modules."""
        hf_name: str = FAMILIES[self.spec.family].hf_name(name)
        return hf_name

    def to_hf_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter in the shape used by Hugging Face files."""
        return tensor.T if is_transposed(FAMILIES[self.spec.family], name) else tensor

    def to_hf_tensors(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of a parameter. Expert weights become one tensor per expert."""
        parts = stored_tensor_names(self.spec, name)
        return super().to_hf_tensors(name, tensor) if parts is None else split_parts(tensor, parts)

    @property
    def stores_transposed(self) -> bool:
        """Whether files store linear weights as [in, out] (PEFT's fan_in_fan_out)."""
        return hasattr(FAMILIES[self.spec.family], "TRANSPOSED")

    def hf_config(self) -> dict[str, object]:
        """Return the config.json: the source config, updated by the fields of the spec."""
        # with a single window of mistral, layer_types would make transformers choose another class
        source = {key: value for key, value in self._source_config.items() if key != "layer_types"}
        return {**source, **spec_to_config(self.spec)}

    @property
    def vocab_size(self) -> int:
        """Number of rows of the token embedding."""
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        """The maximum sequence length."""
        return self.spec.max_positions

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""
        return self.spec.fingerprint()

    def describe(self) -> dict[str, object]:
        """Return the architecture as a JSON value."""
        return self.spec.describe()
