"""Keys of DPO, IPO, ORPO and SimPO."""

from typing import Literal

from pydantic import Field

from whet.config.section import Section, Text


class PreferenceObjective(Section):
    """Preferences: of two answers, one is to become more likely than the other."""

    kind: Literal["dpo", "ipo", "orpo", "simpo"] = Field(description="dpo and ipo need a reference")
    beta: float | None = Field(
        None,
        gt=0,
        description="strength; null: 0.1 (dpo, ipo), 2.0 (simpo), 0.1 as the weight of orpo's odds",
    )
    gamma: float = Field(1.0, ge=0, description="simpo: the margin that is asked for")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="dpo: share of pairs taken to be wrong")
    logprobs: Literal["sum", "mean"] = Field(
        "sum", description="ipo: over the tokens of an answer, as in the paper; mean: per token, as in TRL"
    )
    reference: Literal["precompute", "online"] = Field(
        "precompute",
        description="dpo, ipo: what the reference says, once before the run, or again in each step",
    )
    reference_model: Text | None = Field(
        None,
        description="dpo, ipo: the reference's name or path; null: the model as it is before the first step",
    )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with another model."""
        return self.kind in ("dpo", "ipo")

    @property
    def strength(self) -> float:
        """`beta`, or the paper's."""
        return self.beta or (2.0 if self.kind == "simpo" else 0.1)
