"""Sizes that a plan needs: micro-batches, parameters by part, and the KV cache per token."""

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
    """Return the shape of a full micro-batch of the longest documents, and the tokens per step."""
    run, data, settings = config.run, config.data, step_settings(config)
    length = min(data.max_length - 1 + step.completion_tokens, settings.micro_tokens)
    tokens = run.batch_tokens or (run.batch_size or 1) * step.documents * length
    documents = max(1, min(settings.micro_tokens, tokens) // settings.padded(length))
    documents += -documents % step.multiple
    return BatchShape(documents, length, data.pack), tokens


def step_settings(config: RunConfig) -> StepSettings:
    """Return the settings that split steps into micro-batches."""
    run = config.run
    return StepSettings(run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=config.data.pack)


def parameters_by_part(model: LanguageModel) -> dict[str, int]:
    """Return the number of parameters of embedding, attention, feed-forward layers, norms and head.

    Parts are recognized by the names of the modules.
    """
    head = model.head().weight
    tied = any(isinstance(m, nn.Embedding) and m.weight is head for m in model.modules())
    keywords = {
        "norms": ("norm", "ln_"),
        "embedding": ("embed", "wte", "wpe"),
        "attention": ("attn", "attention"),
        "feedforward": ("mlp", "feed_forward", "ffn", "moe", "expert"),
    }
    counts = dict.fromkeys(("embedding", "attention", "feedforward", "norms", "head", "other"), 0)
    for name, p in model.named_parameters():
        part = next(
            (part for part, words in keywords.items() if any(word in name for word in words)), "other"
        )
        if p is head:
            part = "embedding" if tied else "head"
        counts[part] += p.numel()
    return {part: count for part, count in counts.items() if count}


def cache_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """Return the bytes of one token in the KV cache of all layers, ignoring attention windows."""
    if isinstance(model, Decoder):
        return sum(map(_cached_values, model.spec.attention_specs)) * dtype.itemsize
    config = model.hf_config()
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    return int(values * len(list(model.blocks())) * dtype.itemsize)


def _cached_values(attention: AttentionSpec | LatentAttentionSpec) -> int:
    """Return the cached values per token and layer."""
    if isinstance(attention, LatentAttentionSpec):
        return attention.kv_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim
