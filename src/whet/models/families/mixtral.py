"""Mixtral: Mistral with experts in every layer and renormalized scores."""

from typing import Any

from whet.models.families import llama, mistral, moe
from whet.models.families.config_fields import Config, integer
from whet.models.spec import ModelSpec

MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"
hf_name = llama.hf_name
stored_tensor_names = moe.expert_parts("w1", "w3", "w2", module="block_sparse_moe")


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    return "router_jitter_noise" if config.get("router_jitter_noise") else llama.unsupported_feature(config)


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, **config, **llama.NO_BIASES}
    windows = [config.get("sliding_window")] * integer(config, "num_hidden_layers")
    spec = mistral.with_windows(llama.from_config(config), windows, family=MODEL_TYPE)
    experts = moe.read_experts(
        {"num_local_experts": 8, "num_experts_per_tok": 2, **config},
        width="intermediate_size",
        renormalise=True,
    )
    return moe.with_experts(spec, experts)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    mixture = spec.blocks[0].expert_feedforward
    config = {**mistral.to_config(moe.without_experts(spec)), "architectures": [ARCHITECTURE]}
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "num_local_experts": mixture.experts, "num_experts_per_tok": mixture.top_k}
