"""The `method` section: full fine-tuning or adapters."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from whet.config.section import KeyInfo, Positive, Section, UsedWhen

_ADAPTERS = KeyInfo(used_when=UsedWhen("kind", ("lora", "qlora")))
# keys that describe an adapter, which method.continue reads from the adapter's files
STORED_KEYS = (
    *("kind", "rank", "alpha", "dropout", "variant"),
    *("targets", "layers", "rank_pattern", "alpha_pattern", "modules_to_save"),
)


class Method(Section):
    """The training method: full fine-tuning, LoRA or QLoRA."""

    kind: Literal["full", "lora", "qlora"] = Field(
        "lora",
        description="full: train all weights; lora: low-rank adapters; qlora: LoRA on a 4-bit base model",
    )
    rank: Annotated[Positive, _ADAPTERS] = Field(8, description="rank of the adapters")
    alpha: Annotated[float, _ADAPTERS] = Field(
        16.0,
        gt=0,
        description="adapter scaling: the update is multiplied by alpha / rank (rslora: alpha / sqrt(rank))",
    )
    dropout: Annotated[float, _ADAPTERS] = Field(
        0.0, ge=0, lt=1, description="dropout probability on the adapter input; 0: no dropout"
    )
    variant: Annotated[Literal["lora", "rslora", "dora", "pissa"], _ADAPTERS] = Field(
        "lora", description="adapter variant, see docs/adapters.md"
    )
    targets: Annotated[str | list[str], _ADAPTERS] = Field(
        "all-linear",
        description="modules that get adapters: all-linear, attention, mlp, qv, experts, routers, a regular "
        "expression matched against the end of a module path, or a list of these",
    )
    layers: Annotated[Positive | list[int] | None, _ADAPTERS] = Field(
        None,
        description="layers that get adapters: N for the last N layers, or a list of layer indices from 0; "
        "null: all",
    )
    rank_pattern: Annotated[dict[str, Positive], _ADAPTERS] = Field(
        {}, description="rank of individual modules: {regular expression: rank}; others use rank"
    )
    alpha_pattern: Annotated[dict[str, Annotated[float, Field(gt=0)]], _ADAPTERS] = Field(
        {}, description="alpha of individual modules: {regular expression: alpha}; others use alpha"
    )
    lr_ratio: Annotated[float | None, _ADAPTERS] = Field(
        None, gt=0, description="LoRA+: learning rate of B divided by that of A; null: the same"
    )
    modules_to_save: Annotated[list[str], _ADAPTERS] = Field(
        [], description="modules trained in full alongside the adapters, such as [embed_tokens, lm_head]"
    )
    continues: bool = Field(
        False,
        alias="continue",
        description="train the adapter of `model` further, instead of merging it and training a new one; "
        "the keys that describe an adapter then come from its files",
    )

    @model_validator(mode="after")
    def _check_continue(self) -> "Method":
        if self.continues and self.kind == "full":
            raise ValueError("method.continue trains an adapter, so it needs method.kind: lora or qlora")
        return self

    @model_serializer(mode="wrap")
    def _omit_keys_of_stored_adapter(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that are not set if the adapter's files decide them: defaults would mislead."""
        values: dict[str, Any] = serialize(self)  # Any: JSON values
        if not self.continues:
            return values
        unset = set(STORED_KEYS) - self.model_fields_set
        return {key: value for key, value in values.items() if key not in unset}
