"""A model that is trained from scratch."""

from typing import Any, Literal

from pydantic import Field

from whet.config.section import Positive, Section, Text


class Preset(Section):
    """A model to train from scratch: a named shape, and what is different in it."""

    preset: Literal["nano", "micro", "nano-moe", "gpt2-small", "llama-135m", "llama-360m", "llama-1b"] = (
        Field(description="the shape to start from")
    )
    tokenizer: Text = Field(
        "bytes",
        description="bytes, chars, bpe:N (made from the training records), or the name or directory of one "
        "that exists",
    )
    vocab_size: Positive | None = Field(None, description="null: as many as the tokenizer has")
    d_model: Positive | None = Field(None, description="size of the residual stream; null: the preset's")
    layers: Positive | None = Field(None, description="null: the preset's, as for all keys below")
    heads: Positive | None = Field(None, description="query heads")
    kv_heads: Positive | None = Field(None, description="key/value heads")
    head_dim: Positive | None = Field(None, description="channels of a head")
    width: Positive | None = Field(None, description="size of the feed-forward layers, or of one expert")
    max_positions: Positive | None = Field(None, description="longest sequence")
    attention: Literal["grouped", "multi-head", "window", "latent", "no-position", "none"] | None = Field(
        None, description="attention of every layer that pattern does not say otherwise for"
    )
    feedforward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2", "none"] | None = Field(
        None, description="feed-forward layers"
    )
    experts: Positive | None = Field(None, description="experts instead of one feed-forward layer")
    top_k: Positive | None = Field(None, description="experts that a token is sent to")
    shared_experts: int | None = Field(None, ge=0, description="experts that every token is sent to")
    router: Literal["softmax", "sigmoid"] | None = Field(None, description="how experts are scored")
    balance_bias: bool | None = Field(
        None, description="a bias on the choice of experts, see experts.bias_rate"
    )
    norm: Literal["rms", "layer", "none"] | None = Field(None, description="normalisation")
    placement: Literal["pre", "post", "sandwich"] | None = Field(None, description="where the norms are")
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "none"] | None = Field(
        None, description="how positions are told apart"
    )
    rope_theta: float | None = Field(None, gt=0, description="base of the rotary frequencies")
    window: Positive | None = Field(None, description="positions that windowed attention sees")
    kv_rank: Positive | None = Field(None, description="size of the latent of latent attention")
    bias: bool | None = Field(None, description="biases in the linear layers")
    tied_head: bool | None = Field(None, description="the head is the embedding")
    pattern: str | None = Field(
        None, min_length=1, description="a letter a layer, repeated: * g w l n a f, see docs/pretraining.md"
    )

    def changes(self) -> dict[str, Any]:  # Any: each key has a type of its own
        """What differs from the preset."""
        given = self.model_dump(exclude={"preset", "tokenizer"})
        return {key: value for key, value in given.items() if value is not None}
