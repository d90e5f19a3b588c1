"""Qwen3-MoE: Qwen3 with experts in all layers except those listed in the config."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama, moe
from whet.models.families.config_fields import Config, integer
from whet.models.families.mistral import with_windows
from whet.models.spec import ExpertsSpec, FeedForwardSpec, ModelSpec

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
unsupported_feature = llama.unsupported_feature
hf_name = llama.hf_name
stored_tensor_names = moe.expert_parts("gate_proj", "up_proj", "down_proj")


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    config = {"intermediate_size": config.get("moe_intermediate_size"), **config, "mlp_bias": False}
    layers = integer(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    spec = with_windows(llama.from_config(config), [window] * layers, family=MODEL_TYPE)
    blocks = tuple(replace(b, attention=replace(b.grouped_attention, qk_norm="head")) for b in spec.blocks)
    experts = moe.read_experts(
        config, width="moe_intermediate_size", renormalise=bool(config.get("norm_topk_prob", False))
    )
    sparse_step, dense_layers = (
        int(config.get("decoder_sparse_step") or 1),
        config.get("mlp_only_layers") or (),
    )
    dense = [layer for layer in range(layers) if layer in dense_layers or (layer + 1) % sparse_step]
    return moe.with_experts(replace(spec, blocks=blocks), experts, dense=dense)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    config = {**llama.to_config(moe.without_experts(spec)), "architectures": [ARCHITECTURE]}
    del config["mlp_bias"]
    kinds = [block.feedforward for block in spec.blocks]
    dense = [layer for layer, kind in enumerate(kinds) if not isinstance(kind, ExpertsSpec)]
    widths = [kind.width for kind in kinds if isinstance(kind, FeedForwardSpec)]
    if widths:
        config["intermediate_size"] = widths[0]
    else:
        del config["intermediate_size"]  # no layer uses it, so the value of the source config is kept
    [mixture, *_] = spec.expert_specs or [spec.blocks[0].expert_feedforward]
    window = spec.blocks[0].grouped_attention.window
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
