"""Qwen3-MoE: Qwen3 with experts in all layers but those it lists."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama, moe
from whet.models.families.config_fields import Config, integer
from whet.models.families.mistral import with_windows
from whet.models.spec import ExpertsSpec, FeedForwardSpec, ModelSpec

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
unsupported = llama.unsupported
hf_name = llama.hf_name
stored_parts = moe.parts_by("gate_proj", "up_proj", "down_proj")


def from_config(config: Config) -> ModelSpec:
    """Read a Hugging Face config."""
    config = {"intermediate_size": config.get("moe_intermediate_size"), **config, "mlp_bias": False}
    layers = integer(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    spec = with_windows(llama.from_config(config), [window] * layers, family=MODEL_TYPE)
    blocks = tuple(replace(b, attention=replace(b.grouped, qk_norm="head")) for b in spec.blocks)
    read = moe.read_experts(
        config, width="moe_intermediate_size", renormalise=bool(config.get("norm_topk_prob", False))
    )
    every, listed = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    dense = [layer for layer in range(layers) if layer in listed or (layer + 1) % every]
    return moe.with_experts(replace(spec, blocks=blocks), read, dense=dense)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The Hugging Face config of a spec: the inverse of `from_config`."""
    config = {**llama.to_config(moe.without_experts(spec)), "architectures": [ARCHITECTURE]}
    del config["mlp_bias"]
    kinds = [block.feedforward for block in spec.blocks]
    dense = [layer for layer, kind in enumerate(kinds) if not isinstance(kind, ExpertsSpec)]
    widths = [kind.width for kind in kinds if isinstance(kind, FeedForwardSpec)]
    if widths:
        config["intermediate_size"] = widths[0]
    else:
        del config["intermediate_size"]  # of no layer: the one it was loaded with stays
    [mixture, *_] = spec.mixtures or [spec.blocks[0].routed]
    window = spec.blocks[0].grouped.window
    return {
        **config,
        "moe_intermediate_size": mixture.width,
        "num_experts": mixture.experts,
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": mixture.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
