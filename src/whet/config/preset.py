"""The `model` section of a model trained from scratch."""

from typing import Any, Literal

from pydantic import Field

from whet.config.section import Positive, Section, Text


class Preset(Section):
    """A model to train from scratch: a named architecture and changes to it."""

    preset: Literal["nano", "micro", "nano-moe", "gpt2-small", "llama-135m", "llama-360m", "llama-1b"] = (
        Field(description="architecture to start from")
    )
    tokenizer: Text = Field(
        "bytes",
        description="bytes, chars, bpe:N (trained on the training records with N tokens), or the name or "
        "directory of an existing tokenizer",
    )
    vocab_size: Positive | None = Field(None, description="vocabulary size; null: that of the tokenizer")
    d_model: Positive | None = Field(None, description="width of the residual stream; null: the preset's")
    layers: Positive | None = Field(
        None, description="number of layers; null: the preset's, as for all keys below"
    )
    heads: Positive | None = Field(None, description="number of query heads")
    kv_heads: Positive | None = Field(None, description="number of key/value heads")
    head_dim: Positive | None = Field(None, description="dimensions per head")
    width: Positive | None = Field(None, description="hidden size of a feed-forward layer or of one expert")
    max_positions: Positive | None = Field(None, description="maximum sequence length, in tokens")
    attention: Literal["grouped", "multi-head", "window", "latent", "no-position", "none"] | None = Field(
        None, description="attention type of layers that pattern does not set"
    )
    feedforward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2", "none"] | None = Field(
        None, description="type of the feed-forward layers"
    )
    experts: Positive | None = Field(
        None, description="number of routed experts per layer, replacing the feed-forward layer"
    )
    top_k: Positive | None = Field(None, description="experts selected per token")
    shared_experts: int | None = Field(None, ge=0, description="experts that process every token")
    router: Literal["softmax", "sigmoid"] | None = Field(None, description="scoring function of the router")
    balance_bias: bool | None = Field(
        None, description="add a bias to the router scores when selecting experts, see experts.bias_rate"
    )
    norm: Literal["rms", "layer", "none"] | None = Field(None, description="type of normalization")
    placement: Literal["pre", "post", "sandwich"] | None = Field(
        None, description="norms before each sublayer, after it, or both"
    )
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "none"] | None = Field(
        None, description="type of position encoding"
    )
    rope_theta: float | None = Field(None, gt=0, description="base of the rotary position frequencies")
    window: Positive | None = Field(None, description="window attention: number of visible positions")
    kv_rank: Positive | None = Field(
        None, description="latent attention: size of the compressed key/value vector"
    )
    bias: bool | None = Field(None, description="use biases in the linear layers")
    tied_head: bool | None = Field(None, description="share the weights of the embedding and the head")
    pattern: str | None = Field(
        None,
        min_length=1,
        description="layer types, one letter per layer, repeated: * g w l n a f, see docs/pretraining.md",
    )

    def changes(self) -> dict[str, Any]:  # Any: values of the keys
        """Return the keys that differ from the preset, with their values."""
        values = self.model_dump(exclude={"preset", "tokenizer"})
        return {key: value for key, value in values.items() if value is not None}
