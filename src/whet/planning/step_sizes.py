"""Sizes that a plan starts from: of batches, of a model's parts, of a token in the cache."""

import torch
from torch import nn

from whet.config.run_config import RunConfig
from whet.data.packing import StepSettings
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.models.spec import AttentionSpec, LatentAttentionSpec
from whet.planning.meta_model import BatchShape
from whet.recipes.recipe import StepShape


def batch_shape(config: RunConfig, step: StepShape) -> tuple[BatchShape, int]:
    """A full micro-batch of the longest documents, and the tokens of a step."""
    run, data, settings = config.run, config.data, settings_of(config)
    length = min(data.max_length - 1 + step.more_tokens, settings.micro_tokens)
    tokens = run.batch_tokens or (run.batch_size or 1) * step.documents * length
    documents = max(1, min(settings.micro_tokens, tokens) // settings.padded(length))
    documents += -documents % step.multiple
    return BatchShape(documents, length, data.pack), tokens


def settings_of(config: RunConfig) -> StepSettings:
    """How steps are cut into micro-batches."""
    run = config.run
    return StepSettings(run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=config.data.pack)


def parameters_by_part(model: LanguageModel) -> dict[str, int]:
    """Embedding, attention, feed-forward layers, norms and head, by the names of modules."""
    head = model.head().weight
    tied = any(isinstance(m, nn.Embedding) and m.weight is head for m in model.modules())
    words = {
        "norms": ("norm", "ln_"),
        "embedding": ("embed", "wte", "wpe"),
        "attention": ("attn", "attention"),
        "feedforward": ("mlp", "feed_forward", "ffn", "moe", "expert"),
    }
    found = dict.fromkeys(("embedding", "attention", "feedforward", "norms", "head", "other"), 0)
    for name, p in model.named_parameters():
        part = next((part for part, known in words.items() if any(word in name for word in known)), "other")
        if p is head:
            part = "embedding" if tied else "head"
        found[part] += p.numel()
    return {part: count for part, count in found.items() if count}


def cache_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """What the keys and values of one token take in all layers, windows aside."""
    if isinstance(model, Decoder):
        return sum(map(_cached_numbers, model.spec.attentions)) * dtype.itemsize
    config = model.hf_config()
    heads = config.get("num_attention_heads") or 1
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    numbers = 2 * (config.get("num_key_value_heads") or heads) * size
    return int(numbers * len(list(model.blocks())) * dtype.itemsize)


def _cached_numbers(attention: AttentionSpec | LatentAttentionSpec) -> int:
    if isinstance(attention, LatentAttentionSpec):
        return attention.kv_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim
