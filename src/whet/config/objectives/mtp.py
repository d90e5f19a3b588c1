"""Config keys of multi-token prediction and of its heads' layers."""

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.section import KeyInfo, ObjectiveSection, Positive, Section


class MTPBlock(Section):
    """The layer of each prediction head: causal, with RMS pre-norms."""

    attention: Literal["grouped", "multi-head", "window", "latent", "no-position"] = Field(
        "grouped", description="attention type, as in model.attention"
    )
    heads: Positive | None = Field(None, description="number of query heads; null: d_model / head_dim")
    kv_heads: Positive | None = Field(None, description="number of key/value heads; null: heads")
    head_dim: Positive | None = Field(
        None, description="dimensions per head; null: d_model / heads if heads is set, else 64"
    )
    window: Positive | None = Field(None, description="window attention: number of visible positions")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary position frequencies")
    feedforward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2", "none"] = Field(
        "swiglu", description="type of the feed-forward layer"
    )
    width: Positive | None = Field(
        None, description="hidden size of the feed-forward layer; null: 8/3 * d_model"
    )
    bias: bool = Field(False, description="use biases in the linear layers")

    def changes(self) -> dict[str, Any]:  # Any: values of the keys
        """Return the keys that are not null, with their values."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class MTPObjective(ObjectiveSection):
    """Multi-token prediction: extra heads predict tokens beyond the next one."""

    kind: Literal["mtp"] = Field(
        description="multi-token prediction: next-token loss + weight * mean loss of the heads"
    )
    n_predict: Positive = Field(
        2, description="number of heads; head k predicts the token k positions after the next one"
    )
    weight: float = Field(0.3, gt=0, description="weight of the mean loss of the heads")
    block: Annotated[MTPBlock | None, KeyInfo(changes_loss=False)] = Field(
        None,
        description="layer of each head; null: like the model's last layer, or the defaults of block for "
        "models loaded through transformers",
    )
