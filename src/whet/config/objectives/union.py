"""The union of all objective kinds, and the SFT section, which only has `kind`."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.distrust import DistrustObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.mtp import MTPObjective
from whet.config.objectives.preference import PreferenceObjective
from whet.config.quality import RegressionObjective
from whet.config.section import ObjectiveSection


class SFTObjective(ObjectiveSection):
    """Fine-tuning and pretraining: cross-entropy of the supervised tokens."""

    kind: Literal["sft"] = Field(
        "sft", description="supervised fine-tuning or pretraining: next-token cross-entropy"
    )


AnyObjective = Annotated[
    SFTObjective
    | PreferenceObjective
    | DistillObjective
    | MTPObjective
    | DistrustObjective
    | ClassifyObjective
    | GRPOObjective
    | RegressionObjective,
    Field(discriminator="kind"),
]

_SECTIONS: dict[str, type[ObjectiveSection]] = {
    kind: section
    for section in get_args(get_args(AnyObjective)[0])
    for kind in get_args(section.model_fields["kind"].annotation)
}
OBJECTIVE_KINDS = (*_SECTIONS, "mix")  # pydantic puts these names into error locations


def objective_section(kind: object) -> type[ObjectiveSection]:
    """Return the section class of an objective kind, or the base class for mix, custom and unknown kinds."""
    return _SECTIONS.get(kind, ObjectiveSection) if isinstance(kind, str) else ObjectiveSection
