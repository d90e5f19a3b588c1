"""The `method` section: how weights are trained."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.section import KeyInfo, Positive, ReadBy, Section

_ADAPTERS = KeyInfo(read_by=ReadBy("kind", ("lora", "qlora")))


class Method(Section):
    """How weights are trained."""

    kind: Literal["full", "lora", "qlora"] = Field(
        "lora", description="full: every weight; lora: low-rank adapters; qlora: these, on a base in 4 bits"
    )
    rank: Annotated[Positive, _ADAPTERS] = Field(8, description="rank of the adapters")
    alpha: Annotated[float, _ADAPTERS] = Field(
        16.0, gt=0, description="adapter scale: the update is multiplied by alpha / rank"
    )
    dropout: Annotated[float, _ADAPTERS] = Field(
        0.0, ge=0, lt=1, description="dropout on the adapters' input"
    )
    variant: Annotated[Literal["lora", "rslora", "dora", "pissa"], _ADAPTERS] = Field(
        "lora", description="kind of adapter, see docs/adapters.md"
    )
    targets: Annotated[str | list[str], _ADAPTERS] = Field(
        "all-linear",
        description="layers that get adapters: all-linear, attention, mlp, qv, experts, routers, a regular "
        "expression for the end of a layer's path, or a list of these",
    )
    layers: Annotated[Positive | list[int] | None, _ADAPTERS] = Field(
        None, description="adapters on the last N layers, or on the layers listed; all when empty"
    )
    rank_pattern: Annotated[dict[str, Positive], _ADAPTERS] = Field(
        {}, description="a rank of their own for some layers: {regular expression: rank}"
    )
    alpha_pattern: Annotated[dict[str, Annotated[float, Field(gt=0)]], _ADAPTERS] = Field(
        {}, description="an alpha of their own for some layers: {regular expression: alpha}"
    )
    lr_ratio: Annotated[float | None, _ADAPTERS] = Field(
        None, gt=0, description="LoRA+: the learning rate of B is this many times that of A"
    )
    modules_to_save: Annotated[list[str], _ADAPTERS] = Field(
        [], description="modules trained whole beside the adapters, such as [embed_tokens, lm_head]"
    )
