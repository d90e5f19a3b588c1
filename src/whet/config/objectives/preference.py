"""Keys of DPO, IPO, ORPO and SimPO."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.section import KeyInfo, ObjectiveSection, ReadBy, Text

_REFERENCED = ("dpo", "ipo")
_WITH_REFERENCE = ReadBy("kind", _REFERENCED)


class PreferenceObjective(ObjectiveSection):
    """Preferences: of two answers, one is to become more likely than the other."""

    answer_level_kinds = _REFERENCED

    kind: Literal["dpo", "ipo", "orpo", "simpo"] = Field(description="dpo and ipo need a reference")
    beta: float | None = Field(
        None,
        gt=0,
        description="strength; null: 0.1 (dpo, ipo), 2.0 (simpo), 0.1 as the weight of orpo's odds",
    )
    gamma: Annotated[float, KeyInfo(read_by=ReadBy("kind", ("simpo",)))] = Field(
        1.0, ge=0, description="simpo: the margin that is asked for"
    )
    label_smoothing: Annotated[float, KeyInfo(read_by=ReadBy("kind", ("dpo",)))] = Field(
        0.0, ge=0, lt=0.5, description="dpo: share of pairs taken to be wrong"
    )
    logprobs: Annotated[Literal["sum", "mean"], KeyInfo(read_by=ReadBy("kind", ("ipo",)))] = Field(
        "sum", description="ipo: over the tokens of an answer, as in the paper; mean: per token, as in TRL"
    )
    reference: Annotated[
        Literal["precompute", "online"], KeyInfo(read_by=_WITH_REFERENCE, changes_loss=False)
    ] = Field(
        "precompute",
        description="dpo, ipo: what the reference says, once before the run, or again in each step",
    )
    reference_model: Annotated[Text | None, KeyInfo(read_by=_WITH_REFERENCE)] = Field(
        None,
        description="dpo, ipo: the reference's name or path; null: the model as it is before the first step",
    )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with another model."""
        return self.kind in _REFERENCED

    @property
    def strength(self) -> float:
        """`beta`, or the paper's."""
        return self.beta or (2.0 if self.kind == "simpo" else 0.1)
