"""OLMoE: experts in every layer, and QK norms over the full projections."""

from dataclasses import replace
from typing import Any

from whet.models.families import llama, moe
from whet.models.families.config_fields import Config
from whet.models.spec import ModelSpec

MODEL_TYPE = "olmoe"
ARCHITECTURE = "OlmoeForCausalLM"
hf_name = llama.hf_name
stored_tensor_names = moe.expert_parts("gate_proj", "up_proj", "down_proj")


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    return "clip_qkv" if config.get("clip_qkv") else llama.unsupported_feature(config)


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    spec = llama.from_config({"rms_norm_eps": 1e-5, **config, "mlp_bias": False})
    blocks = tuple(replace(b, attention=replace(b.grouped_attention, qk_norm="all")) for b in spec.blocks)
    experts = moe.read_experts(
        {"num_experts": 64, "num_experts_per_tok": 8, **config},
        width="intermediate_size",
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    return moe.with_experts(replace(spec, family=MODEL_TYPE, blocks=blocks), experts)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    mixture = spec.blocks[0].expert_feedforward
    config = {**llama.to_config(moe.without_experts(spec)), "architectures": [ARCHITECTURE]}
    for key in ("mlp_bias", "head_dim"):
        del config[key]
    return {
        **config,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": mixture.renormalise,
    }
