"""GPT-2: learned positions, LayerNorm, a GELU feed-forward layer, and weights stored transposed."""

import re
from typing import Any

from whet.models.families.config_fields import ACTIVATIONS, Config, integer
from whet.models.spec import AttentionSpec, BlockSpec, FeedForwardSpec, ModelSpec, NormSpec

MODEL_TYPE = "gpt2"
ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # attention masks in old checkpoints
TRANSPOSED = re.compile(r"(qkv_proj|o_proj|up_proj|down_proj)\.weight$")

_NAMES = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "self_attn": "attn",
}


def unsupported_feature(config: Config) -> str | None:
    """Return the feature of this config that is not supported natively, or None."""
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        return "its attention scaling"
    if config.get("add_cross_attention"):
        return "cross-attention"
    name = config.get("activation_function", "gelu_new")
    return None if name in ACTIVATIONS else f"activation {name!r}"


def from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config."""
    d_model, heads = integer(config, "n_embd"), integer(config, "n_head")
    block = BlockSpec(
        attention=AttentionSpec(
            heads=heads, kv_heads=heads, head_dim=d_model // heads, bias=True, out_bias=True, fused=True
        ),
        feedforward=FeedForwardSpec(
            width=int(config.get("n_inner") or 4 * d_model),
            activation=ACTIVATIONS[config.get("activation_function", "gelu_new")],
            gated=False,
            bias=True,
        ),
    )
    return ModelSpec(
        family=MODEL_TYPE,
        vocab_size=integer(config, "vocab_size"),
        d_model=d_model,
        blocks=(block,) * integer(config, "n_layer"),
        norm=NormSpec(kind="layer", eps=float(config.get("layer_norm_epsilon", 1e-5))),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        max_positions=integer(config, "n_positions"),
        positions="learned",
    )


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a spec, the inverse of `from_config`."""
    block = spec.blocks[0]
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "vocab_size": spec.vocab_size,
        "n_embd": spec.d_model,
        "n_head": block.grouped_attention.heads,
        "n_layer": len(spec.blocks),
        "n_positions": spec.max_positions,
        "n_inner": block.dense_feedforward.width,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(
            block.dense_feedforward.activation, block.dense_feedforward.activation
        ),
        "layer_norm_epsilon": spec.norm.eps,
        "tie_word_embeddings": spec.tied_head,
    }


def hf_name(name: str) -> str:
    """Return the Hugging Face name of one of the decoder's parameters or modules."""
    if match := re.fullmatch(r"layers\.(\d+)(?:\.(.*))?", name):
        layer, inner = match.groups()
        return f"transformer.h.{layer}" + (f".{_translate(inner)}" if inner else "")
    return _translate(name)


def _translate(name: str) -> str:
    for ours, theirs in _NAMES.items():
        if name == ours or name.startswith(f"{ours}."):
            return theirs + name[len(ours) :]
    return name
