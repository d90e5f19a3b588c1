"""The one Decoder: every native family is this class, built from its ModelSpec."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.models.attention import SelfAttention
from whet.models.cache import KeyValueCache
from whet.models.families import FAMILIES, config_of
from whet.models.feedforward import GatedFeedForward
from whet.models.language_model import LanguageModel
from whet.models.norms import RMSNorm
from whet.models.rope import inverse_frequencies, rotation
from whet.models.spec import BlockSpec, ModelSpec
from whet.ops.attention import Layout
from whet.ops.head import Head


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, block: BlockSpec, *, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.self_attn = SelfAttention(block.attention, d_model=spec.d_model, layer=layer)
        self.post_attention_layernorm = RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.mlp = GatedFeedForward(block.feedforward, d_model=spec.d_model)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        layout: Layout,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Attend, then transform; each adds to the stream."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, layout, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(LanguageModel):
    """A causal language model. Module names follow Hugging Face's llama, less the `model.` in front."""

    def __init__(self, spec: ModelSpec, *, source_config: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(
            Block(block, spec=spec, layer=layer) for layer, block in enumerate(spec.blocks)
        )
        self.norm = RMSNorm(spec.d_model, eps=spec.norm_eps)
        if not spec.tied_head:
            self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        self.grad_checkpoint = False
        self._frequencies: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._source_config = dict(source_config or {})  # token ids and the like, kept for saving

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Final hidden states [B, T, d_model] of tokens [B, T]."""
        layout = layout or Layout()
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        x = self.embed_tokens(tokens)
        turns = self._rotation(positions, dtype=x.dtype)
        recompute = self.grad_checkpoint and cache is None and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, turns, layout, None, use_reentrant=False)
            else:
                x = layer(x, turns, layout, cache)
        return self.norm(x)

    def _rotation(self, positions: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Not a buffer: frequencies are derived, stay float32, and belong in no checkpoint."""
        head_dim = self.spec.blocks[0].attention.head_dim
        key = (positions.device, head_dim)
        if key not in self._frequencies:
            self._frequencies[key] = inverse_frequencies(self.spec.rope, head_dim).to(positions.device)
        cos, sin = rotation(positions, self._frequencies[key])
        return cos.to(dtype), sin.to(dtype)

    def head(self) -> Head:
        """The output projection."""
        return Head(self.embed_tokens.weight if self.spec.tied_head else self.lm_head.weight)

    def new_cache(self) -> KeyValueCache:
        """An empty key/value cache for this model."""
        return KeyValueCache(len(self.layers))

    def blocks(self) -> Iterable[nn.Module]:
        """The layers, in order."""
        return self.layers

    def hf_name(self, name: str) -> str:
        """Hugging Face's name for one of this model's parameters or modules."""
        hf: str = FAMILIES[self.spec.family].hf_name(name)
        return hf

    def hf_config(self) -> dict[str, object]:
        """The config.json: what it was loaded with, under the fields that describe its tensors."""
        return {**self._source_config, **config_of(self.spec)}

    @property
    def vocab_size(self) -> int:
        """Number of token ids the embedding knows."""
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was made for."""
        return self.spec.max_positions

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""
        return self.spec.fingerprint()

    def describe(self) -> dict[str, object]:
        """The architecture as plain JSON."""
        return self.spec.describe()

    def initialise(self, *, std: float = 0.02) -> None:
        """Fresh weights: normal with `std`, norms 1, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=std)
