"""Config keys of a mix of objectives and its parts."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from whet.config.data import Data
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.union import AnyObjective
from whet.config.quality import RegressionObjective
from whet.config.section import ObjectiveSection, Positive, Section


class Part(Section):
    """One objective of a mix, with its data."""

    name: str | None = Field(
        None,
        pattern=r"^[a-z0-9_-]+$",
        description="prefix of this part's metrics; null: the objective's kind",
    )
    weight: float = Field(1.0, gt=0, description="weight of this part's loss in the sum")
    objective: AnyObjective = Field(
        description="objective of this part, with the keys of objective; not another mix"
    )
    data: Data = Field(description="records of this part, with the keys of data")
    batch_size: Positive | None = Field(
        None, description="examples of this part per optimizer step; null: as in run"
    )
    batch_tokens: Positive | None = Field(
        None, description="tokens of this part per optimizer step, instead of batch_size"
    )

    @property
    def label(self) -> str:
        """The name of this part, by default the kind of its objective."""
        return self.name or self.objective.kind

    @model_validator(mode="after")
    def _check_batch(self) -> "Part":
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError("set either batch_size or batch_tokens, not both")
        return self


class MixObjective(ObjectiveSection):
    """A mix: a weighted sum of several objectives, each with separate data."""

    kind: Literal["mix"] = Field(description="mix: every step has a batch of each part")
    parts: list[Part] = Field(min_length=2, description="objectives whose weighted losses are summed")

    @field_validator("parts")
    @classmethod
    def _check_unique_names(cls, parts: list[Part]) -> list[Part]:
        names = [part.label for part in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"the parts are named {', '.join(names)}: give each a different name")
        return parts

    @field_validator("parts")
    @classmethod
    def _check_kinds(cls, parts: list[Part]) -> list[Part]:
        for part in parts:
            if isinstance(part.objective, ClassifyObjective):
                raise ValueError("classify cannot be part of a mix: its head is saved with the model")
            if isinstance(part.objective, GRPOObjective | RegressionObjective):
                raise ValueError(
                    f"{part.objective.kind} cannot be part of a mix: it reads a different kind of data"
                )
        return parts
