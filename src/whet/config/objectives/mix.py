"""Keys of `objective: {kind: mix}` and its parts."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from whet.config.data import Data
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.union import AnyObjective
from whet.config.quality import RegressionObjective
from whet.config.section import ObjectiveSection, Positive, Section


class Part(Section):
    """One of the objectives of a mix, on its own data."""

    name: str | None = Field(
        None,
        pattern=r"^[a-z0-9_-]+$",
        description="what its metrics are called by; null: the objective's kind",
    )
    weight: float = Field(1.0, gt=0, description="what its loss is multiplied by in the sum")
    objective: AnyObjective = Field(description="as the run's own, but not another mix")
    data: Data = Field(description="its records, with the keys of data")
    batch_size: Positive | None = Field(
        None, description="its examples in an optimizer step; null: the run's"
    )
    batch_tokens: Positive | None = Field(None, description="its tokens in an optimizer step, instead")

    @property
    def called(self) -> str:
        """Its name, or the kind of its objective."""
        return self.name or self.objective.kind

    @model_validator(mode="after")
    def _one_size(self) -> "Part":
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError("give either batch_size or batch_tokens")
        return self


class MixObjective(ObjectiveSection):
    """A mix: a weighted sum of objectives, each on its own data."""

    kind: Literal["mix"] = Field(description="every step has a batch of each part")
    parts: list[Part] = Field(min_length=2, description="what is added up")

    @field_validator("parts")
    @classmethod
    def _names_differ(cls, parts: list[Part]) -> list[Part]:
        names = [part.called for part in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"the parts are called {', '.join(names)}: give each a name of its own")
        return parts

    @field_validator("parts")
    @classmethod
    def _can_be_mixed(cls, parts: list[Part]) -> list[Part]:
        for part in parts:
            if isinstance(part.objective, ClassifyObjective):
                raise ValueError(
                    "a classifier is not one of several objectives: its head is saved with the model"
                )
            if isinstance(part.objective, GRPOObjective | RegressionObjective):
                raise ValueError(
                    f"{part.objective.kind} is not one of several objectives: it reads other data"
                )
        return parts
