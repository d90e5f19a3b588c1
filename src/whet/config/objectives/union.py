"""The union of all objective kinds; SFT, which has no keys of its own, is here."""

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
    """Fine-tuning and pretraining: the loss of the next token, on the supervised ones."""

    kind: Literal["sft"] = Field("sft", description="what is optimised")


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
OBJECTIVE_KINDS = (*_SECTIONS, "mix")  # pydantic names the branch it took by them


def section_of_kind(kind: object) -> type[ObjectiveSection]:
    """Return the section of an objective kind; of a mix, a custom kind or an unknown one, the base class."""
    return _SECTIONS.get(kind, ObjectiveSection) if isinstance(kind, str) else ObjectiveSection
