"""Config keys of the distrust objective."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.section import KeyInfo, ObjectiveSection, UsedWhen

_ADDITIVE = KeyInfo(used_when=UsedWhen("mode", ("additive",)))


class DistrustObjective(ObjectiveSection):
    """Distrust: weight each text by its authority and provenance."""

    kind: Literal["distrust"] = Field(
        description="distrust, for text records with auth_weight and prov_entropy"
    )
    mode: Literal["weight", "additive"] = Field(
        "weight",
        description="weight the loss of each text, or add the published term, which has no gradient",
    )
    strength: Annotated[float, KeyInfo(used_when=UsedWhen("mode", ("weight",)))] = Field(
        1.0, ge=0, le=1, description="weight: from 0 (all texts weigh 1) to 1 (weights d^2 / mean(d^2))"
    )
    alpha: Annotated[float, _ADDITIVE] = Field(
        2.7, ge=2.3, le=3.0, description="additive: alpha of the published term"
    )
    scale: Annotated[float | Literal["auto"], _ADDITIVE] = Field(
        0.6, description="additive: weight of the term; auto: about the size of the loss"
    )
