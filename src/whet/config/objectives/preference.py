"""Config keys of preference optimization: DPO, IPO, ORPO and SimPO."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.section import KeyInfo, ObjectiveSection, Text, UsedWhen

_REFERENCED = ("dpo", "ipo")
_WITH_REFERENCE = UsedWhen("kind", _REFERENCED)


class PreferenceObjective(ObjectiveSection):
    """Preference optimization: make the chosen answer more likely than the rejected one."""

    sequence_level_kinds = _REFERENCED

    kind: Literal["dpo", "ipo", "orpo", "simpo"] = Field(
        description="preference loss; dpo and ipo use a reference model"
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="beta of dpo, ipo and simpo, weight of the odds-ratio term of orpo; null: 0.1, simpo 2.0",
    )
    gamma: Annotated[float, KeyInfo(used_when=UsedWhen("kind", ("simpo",)))] = Field(
        1.0, ge=0, description="simpo: target reward margin"
    )
    label_smoothing: Annotated[float, KeyInfo(used_when=UsedWhen("kind", ("dpo",)))] = Field(
        0.0, ge=0, lt=0.5, description="dpo: assumed fraction of pairs with swapped labels; 0: none"
    )
    logprobs: Annotated[Literal["sum", "mean"], KeyInfo(used_when=UsedWhen("kind", ("ipo",)))] = Field(
        "sum",
        description="ipo: sum of the token log-probabilities, as in the paper, or their mean, as in TRL",
    )
    reference: Annotated[
        Literal["precompute", "online"], KeyInfo(used_when=_WITH_REFERENCE, changes_loss=False)
    ] = Field(
        "precompute",
        description="dpo, ipo: compute reference log-probabilities once before training, or in each step",
    )
    reference_model: Annotated[Text | None, KeyInfo(used_when=_WITH_REFERENCE)] = Field(
        None,
        description="dpo, ipo: name or path of the reference model; null: the model before the first step",
    )

    @property
    def has_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.kind in _REFERENCED

    @property
    def resolved_beta(self) -> float:
        """`beta`, or its default for this kind."""
        return self.beta or (2.0 if self.kind == "simpo" else 0.1)
