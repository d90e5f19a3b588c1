"""What may be optimised, and the keys of each."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.config.classify import ClassifyObjective
from whet.config.grpo import GRPOObjective
from whet.config.mtp import MTPObjective
from whet.config.section import Positive, Section, Text


class SFTObjective(Section):
    """Fine-tuning and pretraining: the loss of the next token, on the supervised ones."""

    kind: Literal["sft"] = Field("sft", description="what is optimised")


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


class Teacher(Section):
    """One of several teachers."""

    model: Text = Field(description="its name or path")
    weight: float = Field(1.0, gt=0, description="its share of what is learned, relative to the others")


class Offline(Section):
    """Teachers that were asked before."""

    top_k: Positive = Field(64, description="the likeliest tokens that are kept of each target")


class HiddenMatching(Section):
    """Hidden states that are to become the teacher's."""

    layers: dict[Positive, Positive] = Field(
        min_length=1, description="{layer of the student: layer of the teacher}, counted from 1"
    )
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="mean square of the difference, or 1 - cosine of the angle"
    )
    weight: float = Field(1.0, gt=0, description="what it is multiplied by in the sum")


class DistillObjective(Section):
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

    hidden: HiddenMatching | None = Field(None, description="also match hidden states of one online teacher")

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


class RegressionObjective(Section):
    """Regression: the squared error of the quality-decision task."""

    kind: Literal["regression"] = Field(description="mean squared error over rows and outputs")
    gluing: float = Field(
        0.0, ge=0, description="weight of the disagreement of two experts on the rows they share"
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

# pydantic names the branch it took by them
OBJECTIVE_KINDS = (
    *("sft", "dpo", "ipo", "orpo", "simpo", "distill", "mtp", "distrust", "classify", "grpo", "regression"),
    "mix",
)
