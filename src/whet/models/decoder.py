"""The one Decoder: every native family is this class, built from its ModelSpec."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.models.attention import make_attention
from whet.models.families import FAMILIES, config_of, is_transposed, stored_parts
from whet.models.families.moe import split_parts
from whet.models.kv_cache import KeyValueCache
from whet.models.language_model import LanguageModel
from whet.models.moe import make_feedforward
from whet.models.norms import make_norm
from whet.models.prefix_sharing import share_prefixes
from whet.models.rope import Rotation, rotations, sinusoids, slopes_of
from whet.models.spec import BlockSpec, ModelSpec, RopeSpec
from whet.ops.attention import Layout
from whet.ops.dispatch import is_plan
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
    """One layer; its norms are named as the Hugging Face families with this placement name them."""

    def __init__(self, block: BlockSpec, *, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        before_attention, after_attention, before_mlp, after_mlp = _NORM_NAMES[block.placement]
        self._around_attention = self._around_mlp = None
        if block.attention is not None:
            self._around_attention = (before_attention, after_attention)
            self.self_attn = make_attention(
                block.attention, d_model=spec.d_model, layer=layer, norm=spec.norm
            )
        if block.feedforward is not None:
            self._around_mlp = (before_mlp, after_mlp)
            self.mlp = make_feedforward(block.feedforward, d_model=spec.d_model)
        for name in filter(None, (*(self._around_attention or ()), *(self._around_mlp or ()))):
            self.add_module(name, make_norm(spec.norm, spec.d_model))

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend, then transform; each adds to the stream."""
        if self._around_attention is not None:
            before, after = self._around_attention
            mixed = self.self_attn(self._norm(before, x), rotation, layout, cache, slopes)
            x = x + self._norm(after, mixed)
        if self._around_mlp is not None:
            before, after = self._around_mlp
            x = x + self._norm(after, self.mlp(self._norm(before, x)))
        return x

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, name)(x) if name else x


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody's hook sees what goes through; those that gather and cut weights do not look."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks)


class Decoder(LanguageModel):
    """A causal language model. Module names follow Hugging Face's llama, less the `model.` in front."""

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
        shared = None
        if self.paths.shared_prefixes and tokens.device.type == "cpu" and cache is None and not is_plan():
            shared = share_prefixes(tokens, positions, layout)
        if shared is None or not self._is_blind():
            return self._hidden(tokens, positions, layout, cache)
        states = self._hidden(tokens[:, shared.kept], positions[:, shared.kept], shared.layout, None)
        return states.index_select(1, shared.places)

    def _is_blind(self) -> bool:
        """Whether nothing tells equal places apart: no dropout, no count of tokens, no hook that looks on."""
        return not self.spec.mixtures and not any(
            _is_watched(module) or getattr(module, "drops", False) for module in self.modules()
        )

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: Layout, cache: KeyValueCache | None
    ) -> torch.Tensor:
        x = self._embed(tokens, positions)
        if self.input_has_gradient and torch.is_grad_enabled():
            x.requires_grad_()
        turns = rotations(self.spec.attentions, positions, dtype=x.dtype, known=self._frequencies)
        slopes = slopes_of(self.spec, x, known=self._alibi)
        recompute = self.grad_checkpoint and cache is None and torch.is_grad_enabled()
        for layer, block in zip(self.layers, self.spec.blocks, strict=True):
            turn, slope = None, None
            if block.attention is not None:
                turn = turns.get((block.attention.rope, block.attention.rotated))
                slope = slopes.get(block.attention.heads)
            if recompute:
                x = checkpoint(layer, x, turn, layout, None, slope, use_reentrant=False)
            else:
                x = layer(x, turn, layout, cache, slope)
        return self.norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What tokens [B, T] are to the first layer, wherever they stand."""
        x: torch.Tensor = self.embed_tokens(tokens)
        if self.spec.embedding_scale != 1.0:
            # rounded to the dtype first, as the families that scale were trained
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
        """The output projection."""
        weight = self.embed_tokens.weight if self.spec.tied_head else self.lm_head.weight
        return Head(weight, scale=self.spec.logit_scale, softcap=self.spec.logit_softcap, paths=self.paths)

    def new_cache(self, capacity: int = 0) -> KeyValueCache:
        """An empty key/value cache for this model."""
        return KeyValueCache(len(self.layers), capacity)

    def blocks(self) -> Iterable[nn.Module]:
        """The layers, in order."""
        return self.layers

    def hf_name(self, name: str) -> str:
        """Hugging Face's name for one of this model's parameters or modules."""
        hf: str = FAMILIES[self.spec.family].hf_name(name)
        return hf

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter in the shape in which Hugging Face's files hold it."""
        return tensor.T if is_transposed(FAMILIES[self.spec.family], name) else tensor

    def in_files(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter as Hugging Face's files hold it: the weights of experts one by one."""
        parts = stored_parts(self.spec, name)
        return super().in_files(name, tensor) if parts is None else split_parts(tensor, parts)

    @property
    def stores_transposed(self) -> bool:
        """Whether the files hold linear weights as [in, out] (PEFT's fan_in_fan_out)."""
        return hasattr(FAMILIES[self.spec.family], "TRANSPOSED")

    def hf_config(self) -> dict[str, object]:
        """The config.json: what it was loaded with, under the fields that describe its tensors."""
        # beside a mistral's one window they would make transformers choose another class
        kept = {key: value for key, value in self._source_config.items() if key != "layer_types"}
        return {**kept, **config_of(self.spec)}

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
