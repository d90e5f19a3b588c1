"""The `method` section: how weights are trained."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.section import Positive, Section


class Method(Section):
    """How weights are trained."""

    kind: Literal["full", "lora", "qlora"] = Field(
        "lora", description="full: every weight; lora: low-rank adapters; qlora: these, on a base in 4 bits"
    )
    rank: Positive = Field(8, description="rank of the adapters")
    alpha: float = Field(16.0, gt=0, description="adapter scale: the update is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    variant: Literal["lora", "rslora", "dora", "pissa"] = Field(
        "lora", description="kind of adapter, see docs/adapters.md"
    )
    targets: str | list[str] = Field(
        "all-linear",
        description="layers that get adapters: all-linear, attention, mlp, qv, experts, routers, a regular "
        "expression for the end of a layer's path, or a list of these",
    )
    layers: Positive | list[int] | None = Field(
        None, description="adapters on the last N layers, or on the layers listed; all when empty"
    )
    rank_pattern: dict[str, Positive] = Field(
        {}, description="a rank of their own for some layers: {regular expression: rank}"
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="an alpha of their own for some layers: {regular expression: alpha}"
    )
    lr_ratio: float | None = Field(
        None, gt=0, description="LoRA+: the learning rate of B is this many times that of A"
    )
    modules_to_save: list[str] = Field(
        [], description="modules trained whole beside the adapters, such as [embed_tokens, lm_head]"
    )
