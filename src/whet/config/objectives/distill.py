"""Config keys of distillation: teachers, precomputed log-probabilities, hidden-state matching."""

from typing import Literal

from pydantic import Field, model_validator

from whet.config.section import ObjectiveSection, Positive, Section, Text


class Teacher(Section):
    """One teacher of a weighted ensemble."""

    model: Text = Field(description="name or path of the teacher")
    weight: float = Field(1.0, gt=0, description="weight of the teacher, relative to the other teachers")


class Offline(Section):
    """Offline distillation: teacher log-probabilities that were computed before training."""

    top_k: Positive = Field(64, description="most likely tokens stored per target position")


class HiddenMatchingSection(Section):
    """Hidden-state matching between student and teacher."""

    layers: dict[Positive, Positive] = Field(
        min_length=1, description="{student layer: teacher layer}, counted from 1"
    )
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="distance of the hidden states: mean squared error, or 1 - cosine similarity"
    )
    weight: float = Field(1.0, gt=0, description="weight of this term in the loss")


class DistillObjective(ObjectiveSection):
    """Distillation: match a teacher's distribution over each next token."""

    kind: Literal["distill"] = Field(
        description="distillation: alpha * T^2 * divergence + (1 - alpha) * cross-entropy"
    )
    teacher: Text | list[Teacher] = Field(
        description="teacher model with the same tokenizer, or a weighted list of teachers"
    )
    temperature: float = Field(4.0, gt=0, description="T, which divides the logits of teacher and student")
    alpha: float = Field(
        0.7, gt=0, le=1, description="weight of the divergence from the teacher; 1: no cross-entropy term"
    )
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward", description="KL(teacher || student), KL(student || teacher), or Jensen-Shannon"
    )
    offline: Offline | None = Field(
        None,
        description="use log-probabilities precomputed by `whet teach`; null: run the teacher in each step",
    )

    hidden: HiddenMatchingSection | None = Field(
        None, description="also match the hidden states of a single online teacher; null: off"
    )

    @model_validator(mode="after")
    def _check_hidden(self) -> "DistillObjective":
        if self.hidden is not None and (self.offline is not None or len(self.teachers) > 1):
            raise ValueError(
                "hidden needs a single teacher that runs in each step: set one teacher and no offline"
            )
        return self

    @property
    def teachers(self) -> list[tuple[str, float]]:
        """The teachers as (name, weight) pairs."""
        if isinstance(self.teacher, str):
            return [(self.teacher, 1.0)]
        return [(teacher.model, teacher.weight) for teacher in self.teacher]
