"""Multi-token prediction, and the layer of its heads."""

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.section import KeyInfo, ObjectiveSection, Positive, Section


class MTPBlock(Section):
    """The layer of each head, where it is not that of the model: causal, with RMS norms in front."""

    attention: Literal["grouped", "multi-head", "window", "latent", "no-position"] = Field(
        "grouped", description="its attention, as in model.attention"
    )
    heads: Positive | None = Field(None, description="query heads; null: one for 64 channels of the model")
    kv_heads: Positive | None = Field(None, description="key/value heads; null: as many as heads")
    head_dim: Positive | None = Field(
        None, description="channels of a head; null: 64, or those of the model / heads where heads is given"
    )
    window: Positive | None = Field(None, description="positions that windowed attention sees")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    feedforward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2", "none"] = Field(
        "swiglu", description="its feed-forward layer"
    )
    width: Positive | None = Field(None, description="size of that; null: 8/3 of the model's channels")
    bias: bool = Field(False, description="biases in the linear layers")

    def changes(self) -> dict[str, Any]:  # Any: each key has a type of its own
        """What is given."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class MTPObjective(ObjectiveSection):
    """Multi-token prediction: heads beside the model learn the tokens after the next one."""

    kind: Literal["mtp"] = Field(
        description="the loss of the next token + weight * the mean loss of the heads"
    )
    n_predict: Positive = Field(2, description="heads; head k learns the token k after the next one")
    weight: float = Field(0.3, gt=0, description="of the heads' mean loss")
    block: Annotated[MTPBlock | None, KeyInfo(changes_loss=False)] = Field(
        None, description="the layer of each head; null: one like the model's last, or whet's own"
    )
