"""The `optim` section: optimizer, learning-rate schedule, parameter groups and muP."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.checks.patterns import compile_pattern
from whet.config.section import Factor, KeyInfo, Positive, Section, StepsOrFraction, UsedWhen
from whet.errors import ConfigError

ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "step", "wsd"]

# patterns for parameters whose learning rate has its own config key
ROUTERS = r"\.mlp\.gate\.|^router\."  # in language models | in quality models
LORA_B = r"\.lora_(embedding_)?B(\.|$)"

_ADAM_NAMES = ("adamw", "adam", "adamw8bit", "muon")
_ADAM = KeyInfo(used_when=UsedWhen("name", _ADAM_NAMES))
_ADAM_OR_LION = KeyInfo(used_when=UsedWhen("name", (*_ADAM_NAMES, "lion")))
_SGD = KeyInfo(used_when=UsedWhen("name", ("sgd",)))
_DECAYING = KeyInfo(used_when=UsedWhen("schedule", ("linear", "cosine", "exponential", "step", "wsd")))
_STEP = KeyInfo(used_when=UsedWhen("schedule", ("step",)))
_WSD = KeyInfo(used_when=UsedWhen("schedule", ("wsd",)))

LION_BETAS = (0.9, 0.99)  # arXiv 2302.06675 and its authors' code


class SchedulePhase(Section):
    """One phase of a multi-phase schedule, which starts at the learning rate where the previous one ended."""

    kind: ScheduleKind = Field(description="schedule of the learning rate during this phase")
    steps: Positive | None = Field(
        None, description="length in steps; null, for the last phase only: the rest of the run"
    )
    min_lr_ratio: float | None = Field(
        None, ge=0, le=1, description="this phase ends at lr * min_lr_ratio; null: optim.min_lr_ratio"
    )

    @model_validator(mode="after")
    def _check_constant(self) -> "SchedulePhase":
        if self.kind == "constant" and self.min_lr_ratio is not None:
            raise ValueError("a constant phase does not decay, so it cannot have a min_lr_ratio")
        return self


class ParameterGroup(Section):
    """Settings for parameters whose name contains a match of a pattern. The first such pattern applies."""

    lr_scale: float = Field(1.0, gt=0, description="factor on the learning rate")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay of these parameters; null: optim.weight_decay"
    )


class MuP(Section):
    """Maximal update parametrization: transfer the learning rate from a narrower model (docs/mup.md)."""

    base_width: Positive = Field(description="d_model of the model that the learning rate was tuned on")
    base_head_dim: Positive | None = Field(
        None, description="head_dim of that model; null: it has as many heads as this one"
    )


def mup_problem(method: str, objective: str) -> str | None:
    """Return why muP cannot scale the weights of this method and objective, or None if it can."""
    if method != "full":
        return "optim.mup scales all weights, so it needs method.kind: full"
    if objective in ("mtp", "classify"):
        return f"optim.mup has no scaling rule for the heads of objective.kind {objective}"
    return None


class Optim(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"] = Field(
        "adamw", description="optimizer; adamw8bit needs whet[bitsandbytes]"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    betas: Annotated[tuple[Factor, Factor], _ADAM_OR_LION] = Field(
        (0.9, 0.999), description="betas of Adam(W) and Lion; the default for Lion is [0.9, 0.99]"
    )
    eps: Annotated[float, _ADAM] = Field(1e-8, gt=0, description="epsilon of Adam(W)")
    momentum: Annotated[float, _SGD] = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    nesterov: Annotated[bool, _SGD] = Field(False, description="use Nesterov momentum in SGD")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="weight decay of matrices: part of the gradient in Adam and SGD, decoupled in all others",
    )
    decay_embeddings: bool = Field(
        False, description="apply weight decay to embeddings (and a tied head), as in transformers"
    )
    freeze_pad_row: bool = Field(
        False,
        description="ignore the gradient of the pad token's input embedding, as in transformers",
    )
    clip: float | None = Field(1.0, gt=0, description="maximum gradient norm; null: no clipping")
    schedule: ScheduleKind | list[SchedulePhase] = Field(
        "cosine", description="learning-rate schedule after the warmup: one name, or a list of phases"
    )
    warmup: StepsOrFraction = Field(
        0, description="steps of linear learning-rate warmup from 0; below 1: a fraction of the run's steps"
    )
    min_lr_ratio: Annotated[float, _DECAYING] = Field(
        0.1, ge=0, le=1, description="final learning rate of the schedule, relative to lr"
    )
    decay_every: Annotated[Positive | None, _STEP] = Field(
        None, description="step: steps between two decays (required for this schedule)"
    )
    decay_factor: Annotated[float, _STEP] = Field(
        0.5, gt=0, lt=1, description="step: factor on the learning rate at each decay"
    )
    decay_fraction: Annotated[float, _WSD] = Field(
        0.1, gt=0, le=1, description="wsd: fraction of the run's steps in the final decay"
    )
    groups: dict[str, ParameterGroup] = Field(
        {},
        description="settings of parameters by name: {regular expression: {lr_scale, weight_decay}}",
    )

    router_lr_scale: float | None = Field(
        None, gt=0, description="factor on the learning rate of mixture-of-experts routers; null: 1"
    )

    mup: MuP | None = Field(
        None, description="scale learning rates and initial weights with model width (muP); null: off"
    )

    @property
    def phases(self) -> list[SchedulePhase]:
        """The schedule as a list of phases."""
        return [SchedulePhase(kind=self.schedule)] if isinstance(self.schedule, str) else self.schedule

    def warmup_steps(self, total: int | None) -> int:
        """Return the warmup in steps of a run of `total` steps (None: unknown), fractions rounded up."""
        if isinstance(self.warmup, int):
            return self.warmup
        if total is None:
            raise ConfigError(
                f"optim.warmup: {self.warmup} is a fraction of the run, and its number of steps is not known",
                hint="give the warmup in steps",
            )
        return math.ceil(self.warmup * total)

    @property
    def add_router_group(self) -> "Optim":
        """This section with `router_lr_scale` expressed as the last parameter group."""
        if self.router_lr_scale is None:
            return self
        routers = ParameterGroup(lr_scale=self.router_lr_scale)
        return self.model_copy(update={"groups": {**self.groups, ROUTERS: routers}})

    @model_validator(mode="before")
    @classmethod
    def _set_lion_betas(cls, values: Any) -> Any:  # Any: not yet checked
        if isinstance(values, dict) and values.get("name") == "lion" and "betas" not in values:
            return {**values, "betas": LION_BETAS}
        return values

    @field_validator("groups")
    @classmethod
    def _check_patterns(cls, groups: dict[str, ParameterGroup]) -> dict[str, ParameterGroup]:
        for pattern in groups:
            compile_pattern(pattern)
        return groups

    @model_validator(mode="after")
    def _check_nesterov(self) -> "Optim":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    @model_validator(mode="after")
    def _check_mup(self) -> "Optim":
        if self.mup is not None and self.name == "adafactor":
            raise ValueError("mup has no scaling rule for adafactor, whose steps are relative to the weights")
        decays = [self.weight_decay, *(group.weight_decay for group in self.groups.values())]
        if self.mup is not None and self.name == "adam" and any(decays):
            raise ValueError(
                "mup has no scaling rule for Adam's weight decay, which is part of the gradient: use adamw"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> "Optim":
        if [phase.steps is None for phase in self.phases] != [False] * (len(self.phases) - 1) + [True]:
            raise ValueError(
                "every phase of the schedule except the last needs steps; the last must not have steps"
            )
        start = 1.0
        for phase in self.phases:
            if phase.kind == "step" and self.decay_every is None:
                raise ValueError("schedule: step needs decay_every")
            end = self.min_lr_ratio if phase.min_lr_ratio is None else phase.min_lr_ratio
            if phase.kind == "exponential" and 0 in (start, end):
                raise ValueError(
                    "schedule: exponential cannot start or end at a learning rate of 0: raise min_lr_ratio"
                )
            start = start if phase.kind == "constant" else end
        return self
