"""Keys of the distrust objective."""

from typing import Literal

from pydantic import Field

from whet.config.section import Section


class DistrustObjective(Section):
    """Distrust: texts weighted by authority and provenance."""

    kind: Literal["distrust"] = Field(description="records are texts with auth_weight and prov_entropy")
    mode: Literal["weight", "additive"] = Field(
        "weight", description="weight the loss of each text, or add the published term, which changes nothing"
    )
    strength: float = Field(1.0, ge=0, le=1, description="weight: 0 weights nothing, 1 is d^2 / mean(d^2)")
    alpha: float = Field(2.7, ge=2.3, le=3.0, description="additive: factor of the term")
    scale: float | Literal["auto"] = Field(
        0.6, description="additive: weight of the term; auto: about as large as the loss"
    )
