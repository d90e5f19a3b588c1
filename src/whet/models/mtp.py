"""Heads that predict tokens after the next one, one after another (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

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
from whet.models.rope import Frequencies, Rotation, rotations, slopes_of
from whet.models.spec import BlockSpec, ModelSpec, NormSpec
from whet.ops.attention import Layout
from whet.ops.dispatch import using

_HEAD_DIM = 64


class PredictionHead(nn.Module):
    """norm(block(project([norm(hidden), norm(embedding)]))): one token further than `hidden`."""

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
        ahead: torch.Tensor,
        rotation: Rotation | None,
        layout: Layout,
        cache: KeyValueCache | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states [B, T, D] of the next depth."""
        x = self.project(torch.cat((self.hidden_norm(hidden), self.token_norm(ahead)), dim=-1))
        return self.norm(self.block(x, rotation, layout, cache, slopes))


class PredictionHeads(nn.Module):
    """The heads of a model, without its embedding and output head, which they share.

    Head k turns the hidden states of depth k - 1 (0: the model's) and the embeddings of the tokens k ahead
    into the hidden states of depth k, from which the output head reads the token k + 1 ahead.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec  # a block for each head
        self.layers = nn.ModuleList(PredictionHead(spec, layer=layer) for layer in range(len(spec.blocks)))
        self._frequencies: Frequencies = {}
        self._alibi: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def advance(
        self,
        depth: int,
        hidden: torch.Tensor,
        ahead: torch.Tensor,
        *,
        positions: torch.Tensor,
        layout: Layout,
        cache: KeyValueCache | None = None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Hidden states [B, T, D] of depth `depth`, from those before and the embeddings `depth` ahead."""
        head, attention = self.layers[depth - 1], self.spec.blocks[depth - 1].attention
        turn, slope = None, None
        if attention is not None:
            turns = rotations([attention], positions, dtype=hidden.dtype, known=self._frequencies)
            turn = turns.get((attention.rope, attention.rotated))
            slope = slopes_of(self.spec, hidden, known=self._alibi).get(attention.heads)
        if recompute and cache is None and torch.is_grad_enabled():
            return checkpoint(head, hidden, ahead, turn, layout, None, slope, use_reentrant=False)
        return head(hidden, ahead, turn, layout, cache, slope)

    def new_cache(self) -> KeyValueCache:
        """An empty key/value cache, a layer for each head."""
        return KeyValueCache(len(self))


def new_heads(model: LanguageModel, count: int, block: BlockSpec | None = None) -> PredictionHeads:
    """Fresh heads for a model, where it is and in the dtype of its output head.

    Without a block, theirs is like the model's last layer with attention; models behind the transformers
    bridge have no description of it, and get `own_block`. Drawn from torch's generator of the CPU.
    """
    if count < 1:
        raise ConfigError(f"n_predict={count}: there must be at least one head")
    weight = model.head().weight
    d_model = weight.shape[1]
    embedded = model.embed(torch.zeros(1, 1, dtype=torch.long, device=model.device)).shape[-1]
    if embedded != d_model:
        raise ModelError(
            f"the embedding of {model.name} has {embedded} channels and its output head {d_model}: "
            "heads that share both need one size"
        )
    with using(model.paths), torch.device("meta" if weight.is_meta else "cpu"):  # a plan has no numbers
        heads = PredictionHeads(_spec(model, count, block, d_model=d_model))
    _initialise(heads)
    return heads.to(weight.device, weight.dtype)


def _spec(model: LanguageModel, count: int, block: BlockSpec | None, *, d_model: int) -> ModelSpec:
    """A description of the heads as if they were the layers of a decoder."""
    if block is None and isinstance(model, Decoder):
        spec = model.spec
        last = next((b for b in reversed(spec.blocks) if b.attention is not None), spec.blocks[-1])
        return dataclasses.replace(spec, blocks=(last,) * count)
    return ModelSpec(
        family=whet_family.MODEL_TYPE,
        vocab_size=model.vocab_size,
        d_model=d_model,
        blocks=(block or own_block(d_model),) * count,
        norm=NormSpec(),
        tied_head=True,
        max_positions=model.max_positions,
    )


def block_of(model: LanguageModel, section: MTPObjective) -> BlockSpec | None:
    """The block that a config describes, for `new_heads`."""
    return None if section.block is None else own_block(model.head().weight.shape[1], section.block)


def own_block(d_model: int, section: MTPBlock | None = None) -> BlockSpec:
    """What the keys of a config describe; without any, rotary attention in heads of 64 and a SwiGLU."""
    given = (section or MTPBlock()).changes()
    if "heads" not in given:
        given["head_dim"] = given.get("head_dim", _HEAD_DIM)
        given["heads"] = max(1, d_model // given["head_dim"])
    given.setdefault("width", 8 * d_model // 3)
    try:
        return build_spec(Shape(d_model=d_model, layers=1, vocab_size=1, max_positions=1, **given)).blocks[0]
    except ModelError as error:
        raise ConfigError(f"objective.block: {error.message}", hint=error.hint) from error


@torch.no_grad()
def _initialise(heads: PredictionHeads) -> None:
    """As a decoder from scratch; what is added to a stream, as in a model of so many layers."""
    for name, module in heads.named_modules():
        if isinstance(module, nn.Linear):
            residual = name.endswith(RESIDUAL)
            nn.init.normal_(module.weight, std=STD / math.sqrt(2 * len(heads)) if residual else STD)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, OffsetRMSNorm):
            module.weight.zero_()
