"""The union of all objective kinds; SFT, which has no keys of its own, is here."""

from typing import Annotated, Literal

from pydantic import Field

from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.distrust import DistrustObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.mtp import MTPObjective
from whet.config.objectives.preference import PreferenceObjective
from whet.config.quality import RegressionObjective
from whet.config.section import Section


class SFTObjective(Section):
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

# pydantic names the branch it took by them
OBJECTIVE_KINDS = (
    *("sft", "dpo", "ipo", "orpo", "simpo", "distill", "mtp", "distrust", "classify", "grpo", "regression"),
    "mix",
)
