"""The llama family: Llama 1-3, SmolLM2, TinyLlama and all other checkpoints of model type llama."""

from typing import Any

from whet.models.families import config_fields
from whet.models.families.config_fields import Config, integer
from whet.models.spec import AttentionSpec, BlockSpec, FeedForwardSpec, ModelSpec, NormSpec, RopeSpec

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
NO_BIASES = {"attention_bias": False, "mlp_bias": False}  # for families whose configs have no such keys


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    return config_fields.unsupported_rope(config) or config_fields.unsupported_activation(config)


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    bias = bool(config.get("attention_bias", False))
    block = BlockSpec(
        attention=AttentionSpec(
            heads=integer(config, "num_attention_heads"),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=config_fields.head_dim(config),
            rope=config_fields.rope(config),
            bias=bias,
            out_bias=bias,
        ),
        feedforward=FeedForwardSpec(
            width=integer(config, "intermediate_size"),
            activation=config_fields.activation(config),
            bias=bool(config.get("mlp_bias", False)),
        ),
    )
    return ModelSpec(
        family=MODEL_TYPE,
        vocab_size=integer(config, "vocab_size"),
        d_model=integer(config, "hidden_size"),
        blocks=(block,) * integer(config, "num_hidden_layers"),
        norm=NormSpec(eps=float(config.get("rms_norm_eps", 1e-6))),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
    )


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    attention, feedforward = spec.blocks[0].grouped_attention, spec.blocks[0].dense_feedforward
    return {
        **config_fields.common_config(spec, architecture=ARCHITECTURE),
        **config_fields.rope_keys(attention.rope or RopeSpec()),
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "hidden_act": config_fields.activation_name(feedforward.activation),
        "mlp_bias": feedforward.bias,
    }


def hf_name(name: str) -> str:
    """Return the Hugging Face name of one of the decoder's parameters or modules."""
    return name if name.startswith("lm_head") else f"model.{name}"
