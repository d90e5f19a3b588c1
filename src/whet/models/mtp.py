"""Sequential multi-token prediction heads (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

import dataclasses
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.config.objectives.mtp import MTPBlock, MTPObjective
from whet.errors import ConfigError, ModelError
from whet.models.decoder import Block, Decoder
from whet.models.families import whet as whet_family
from whet.models.from_scratch.init_weights import RESIDUAL, STD
from whet.models.from_scratch.presets import Shape, build_spec
from whet.models.kv_cache import KeyValueCache
from whet.models.language_model import LanguageModel
from whet.models.norms import OffsetRMSNorm, RMSNorm
from whet.models.rope import Frequencies, Rotation, alibi_slopes_by_heads, rope_tables
from whet.models.spec import BlockSpec, ModelSpec, NormSpec
from whet.ops.attention import Layout
from whet.ops.dispatch import use_paths

_HEAD_DIM = 64


class PredictionHead(nn.Module):
    """One prediction head: norm(block(project([norm(hidden), norm(embedding)])))."""

    def __init__(self, spec: ModelSpec, *, layer: int) -> None:
        super().__init__()
        eps = spec.norm.eps
        self.hidden_norm = RMSNorm(spec.d_model, eps=eps)
        self.token_norm = RMSNorm(spec.d_model, eps=eps)
        self.project = nn.Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.block = Block(spec.blocks[layer], spec=spec, layer=layer)
        self.norm = RMSNorm(spec.d_model, eps=eps)

    def forward(
        self,
        hidden: torch.Tensor,
        embeddings: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the hidden states [B, T, D] of the next depth."""
        x = self.project(torch.cat((self.hidden_norm(hidden), self.token_norm(embeddings)), dim=-1))
        return self.norm(self.block(x, rotation, layout, cache, slopes))


class PredictionHeads(nn.Module):
    """The prediction heads of a model. They share its embedding and output head, which are not stored here.

    Head k maps the hidden states of depth k - 1 (depth 0 is the model) and the embeddings of the tokens at
    offset k to the hidden states of depth k. The output head predicts the token at offset k + 1 from them.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec  # one block per head
        self.layers = nn.ModuleList(PredictionHead(spec, layer=layer) for layer in range(len(spec.blocks)))
        self._frequencies: Frequencies = {}
        self._alibi: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def advance(
        self,
        depth: int,
        hidden: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        positions: torch.Tensor,
        layout: Layout,
        cache: KeyValueCache | None = None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Return the hidden states [B, T, D] of depth `depth`.

        `hidden` are the hidden states of depth `depth - 1`, and `embeddings` are those of the tokens at
        offset `depth`.
        """
        head, attention = self.layers[depth - 1], self.spec.blocks[depth - 1].attention
        rotation, slopes = None, None
        if attention is not None:
            tables = rope_tables([attention], positions, dtype=hidden.dtype, cache=self._frequencies)
            rotation = tables.get((attention.rope, attention.rotary_dim))
            slopes = alibi_slopes_by_heads(self.spec, hidden, cache=self._alibi).get(attention.heads)
        if recompute and cache is None and torch.is_grad_enabled():
            return checkpoint(head, hidden, embeddings, rotation, layout, None, slopes, use_reentrant=False)
        return head(hidden, embeddings, rotation, layout, cache, slopes)

    def new_cache(self) -> KeyValueCache:
        """Return an empty key/value cache with one layer per head."""
        return KeyValueCache(len(self))


def new_prediction_heads(model: LanguageModel, count: int, block: BlockSpec | None = None) -> PredictionHeads:
    """Return newly initialized heads for a model, on its device and in the dtype of its output head.

    Without `block`, heads use the architecture of the model's last layer with attention. For models behind
    the transformers bridge this is unknown, so they use `default_block_spec`. Weights are drawn from torch's
    CPU generator.
    """
    if count < 1:
        raise ConfigError(f"n_predict={count} must be at least 1")
    weight = model.head().weight
    d_model = weight.shape[1]
    embedding_size = model.embed(torch.zeros(1, 1, dtype=torch.long, device=model.device)).shape[-1]
    if embedding_size != d_model:
        raise ModelError(
            f"the embedding of {model.name} has {embedding_size} channels and its output head {d_model}: "
            "prediction heads share both, so their sizes must be equal"
        )
    # memory planning uses meta tensors
    with use_paths(model.paths), torch.device("meta" if weight.is_meta else "cpu"):
        heads = PredictionHeads(_spec(model, count, block, d_model=d_model))
    _initialize(heads)
    return heads.to(weight.device, weight.dtype)


def _spec(model: LanguageModel, count: int, block: BlockSpec | None, *, d_model: int) -> ModelSpec:
    """Return the spec of a decoder whose layers are the blocks of the heads."""
    if block is None and isinstance(model, Decoder):
        spec = model.spec
        last_block = next(
            (candidate for candidate in reversed(spec.blocks) if candidate.attention is not None),
            spec.blocks[-1],
        )
        return dataclasses.replace(spec, blocks=(last_block,) * count)
    return ModelSpec(
        family=whet_family.MODEL_TYPE,
        vocab_size=model.vocab_size,
        d_model=d_model,
        blocks=(block or default_block_spec(d_model),) * count,
        norm=NormSpec(),
        tied_head=True,
        max_positions=model.max_positions,
    )


def mtp_block_spec(model: LanguageModel, section: MTPObjective) -> BlockSpec | None:
    """Return the block that a config describes, or None for the default of `new_prediction_heads`."""
    return None if section.block is None else default_block_spec(model.head().weight.shape[1], section.block)


def default_block_spec(d_model: int, section: MTPBlock | None = None) -> BlockSpec:
    """Return the block described by config keys. The default has RoPE, head size 64 and SwiGLU."""
    settings = (section or MTPBlock()).changes()
    if "heads" not in settings:
        settings["head_dim"] = settings.get("head_dim", _HEAD_DIM)
        settings["heads"] = max(1, d_model // settings["head_dim"])
    settings.setdefault("width", 8 * d_model // 3)
    try:
        return build_spec(Shape(d_model=d_model, layers=1, vocab_size=1, max_positions=1, **settings)).blocks[
            0
        ]
    except ModelError as error:
        raise ConfigError(f"objective.block: {error.message}", hint=error.hint) from error


@torch.no_grad()
def _initialize(heads: PredictionHeads) -> None:
    """Initialize like a new decoder. Residual projections are scaled as in a model of as many layers."""
    for name, module in heads.named_modules():
        if isinstance(module, nn.Linear):
            residual = name.endswith(RESIDUAL)
            nn.init.normal_(module.weight, std=STD / math.sqrt(2 * len(heads)) if residual else STD)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, OffsetRMSNorm):
            module.weight.zero_()
