"""Keys of distillation: teachers, stored log-probabilities, hidden-state matching."""

from typing import Literal

from pydantic import Field, model_validator

from whet.config.section import ObjectiveSection, Positive, Section, Text


class Teacher(Section):
    """One of several teachers."""

    model: Text = Field(description="its name or path")
    weight: float = Field(1.0, gt=0, description="its share of what is learned, relative to the others")


class Offline(Section):
    """Teachers that were asked before."""

    top_k: Positive = Field(64, description="the likeliest tokens that are kept of each target")


class HiddenMatchingSection(Section):
    """Hidden states that are to become the teacher's."""

    layers: dict[Positive, Positive] = Field(
        min_length=1, description="{layer of the student: layer of the teacher}, counted from 1"
    )
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="mean square of the difference, or 1 - cosine of the angle"
    )
    weight: float = Field(1.0, gt=0, description="what it is multiplied by in the sum")


class DistillObjective(ObjectiveSection):
    """Distillation: what a teacher thinks of each token."""

    kind: Literal["distill"] = Field(description="alpha * T^2 * divergence + (1 - alpha) * cross-entropy")
    teacher: Text | list[Teacher] = Field(description="a model with the same tokenizer, or several, weighted")
    temperature: float = Field(4.0, gt=0, description="T: both sides' logits are divided by it")
    alpha: float = Field(
        0.7, gt=0, le=1, description="share of the teacher; 1: the right token does not count"
    )
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward", description="KL(teacher || student), KL(student || teacher), or Jensen-Shannon"
    )
    offline: Offline | None = Field(
        None, description="read what `whet teach` wrote instead of asking the teacher in each step"
    )

    hidden: HiddenMatchingSection | None = Field(
        None, description="also match hidden states of one online teacher"
    )

    @model_validator(mode="after")
    def _hidden_states_have_a_teacher(self) -> "DistillObjective":
        if self.hidden is not None and (self.offline is not None or len(self.teachers) > 1):
            raise ValueError("hidden needs one teacher that is there in each step: no list, and no offline")
        return self

    @property
    def teachers(self) -> list[tuple[str, float]]:
        """Names and weights, however they were given."""
        if isinstance(self.teacher, str):
            return [(self.teacher, 1.0)]
        return [(each.model, each.weight) for each in self.teacher]
