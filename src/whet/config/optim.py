"""The optimizer, its learning rate and how that changes during a run."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.checks.patterns import compile_pattern
from whet.config.section import Factor, KeyInfo, Positive, ReadBy, Section

ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "step", "wsd"]

# parameters that have a rate by a key of their own, by name
ROUTERS = r"\.mlp\.gate\.|^router\."  # of language models, and of the quality models
LORA_B = r"\.lora_(embedding_)?B(\.|$)"

_ADAM_NAMES = ("adamw", "adam", "adamw8bit", "muon")
_ADAM = KeyInfo(read_by=ReadBy("name", _ADAM_NAMES))
_ADAM_OR_LION = KeyInfo(read_by=ReadBy("name", (*_ADAM_NAMES, "lion")))
_SGD = KeyInfo(read_by=ReadBy("name", ("sgd",)))
_DECAYING = KeyInfo(read_by=ReadBy("schedule", ("linear", "cosine", "exponential", "step", "wsd")))
_STEP = KeyInfo(read_by=ReadBy("schedule", ("step",)))
_WSD = KeyInfo(read_by=ReadBy("schedule", ("wsd",)))

LION_BETAS = (0.9, 0.99)  # of its paper, arXiv 2302.06675, and of its authors' code


class SchedulePart(Section):
    """One of several schedules in a row; each starts at the rate at which the one before it ended."""

    kind: ScheduleKind = Field(description="how the rate changes during this part")
    steps: Positive | None = Field(
        None, description="how long; the last part takes what is left and has none"
    )
    min_lr_ratio: float | None = Field(
        None, ge=0, le=1, description="this part ends at lr * min_lr_ratio; null: optim.min_lr_ratio"
    )

    @model_validator(mode="after")
    def _constant_has_no_end(self) -> "SchedulePart":
        if self.kind == "constant" and self.min_lr_ratio is not None:
            raise ValueError("a constant part ends where it starts: it has no min_lr_ratio")
        return self


class ParameterGroup(Section):
    """What is different for the parameters whose names a pattern is found in; the first pattern wins."""

    lr_scale: float = Field(1.0, gt=0, description="multiplies the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="instead of optim.weight_decay")


class MuP(Section):
    """Rates and first weights that carry over from a narrow model to this one (docs/mup.md)."""

    base_width: Positive = Field(description="d_model of the model that the rate was found on")
    base_head_dim: Positive | None = Field(
        None, description="channels of its heads; null: it has as many heads as this model"
    )


def unfit_for_mup(method: str, objective: str) -> str | None:
    """Why these train weights that muP has no rule for, or None."""
    if method != "full":
        return "optim.mup is about all weights: it needs method.kind full"
    if objective in ("mtp", "classify"):
        return f"optim.mup has no rule for the heads of objective.kind {objective}"
    return None


class Optim(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"] = Field(
        "adamw", description="the optimizer; adamw8bit needs whet[bitsandbytes]"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    betas: Annotated[tuple[Factor, Factor], _ADAM_OR_LION] = Field(
        (0.9, 0.999), description="averaging factors of Adam(W) and Lion; Lion's default is [0.9, 0.99]"
    )
    eps: Annotated[float, _ADAM] = Field(1e-8, gt=0, description="Adam(W)'s epsilon")
    momentum: Annotated[float, _SGD] = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    nesterov: Annotated[bool, _SGD] = Field(False, description="SGD looks ahead along its momentum")
    weight_decay: float = Field(
        0.0, ge=0, description="of matrices; added to the gradient by Adam and SGD, decoupled in all others"
    )
    decay_embeddings: bool = Field(
        False, description="weight decay on embeddings, too, and so on a tied head, as transformers does"
    )
    freeze_pad_row: bool = Field(
        False,
        description="no gradient to the embedding's row of the pad token from inputs, as in transformers",
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null does not clip")
    schedule: ScheduleKind | list[SchedulePart] = Field(
        "cosine", description="after the warm-up: one schedule, or a list of parts in a row"
    )
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up from 0")
    min_lr_ratio: Annotated[float, _DECAYING] = Field(
        0.1, ge=0, le=1, description="the schedule ends at lr * min_lr_ratio"
    )
    decay_every: Annotated[Positive | None, _STEP] = Field(
        None, description="step: updates from one decay to the next"
    )
    decay_factor: Annotated[float, _STEP] = Field(
        0.5, gt=0, lt=1, description="step: what the rate is then multiplied by"
    )
    decay_fraction: Annotated[float, _WSD] = Field(
        0.1, gt=0, le=1, description="wsd: the share of the run's steps over which the rate falls"
    )
    groups: dict[str, ParameterGroup] = Field(
        {},
        description="other settings for parameters by name: {regular expression: {lr_scale, weight_decay}}",
    )

    router_lr_scale: float | None = Field(
        None, gt=0, description="factor on the rate of routers: a group of those parameters, by name"
    )

    mup: MuP | None = Field(None, description="learning rates and first weights by the width of the model")

    @property
    def parts(self) -> list[SchedulePart]:
        """The schedule as a list, however it was given."""
        return [SchedulePart(kind=self.schedule)] if isinstance(self.schedule, str) else self.schedule

    @property
    def with_router_group(self) -> "Optim":
        """The same, with the rate of routers as the last group."""
        if self.router_lr_scale is None:
            return self
        routers = ParameterGroup(lr_scale=self.router_lr_scale)
        return self.model_copy(update={"groups": {**self.groups, ROUTERS: routers}})

    @model_validator(mode="before")
    @classmethod
    def _lion_has_its_own_betas(cls, values: Any) -> Any:  # Any: not yet checked
        if isinstance(values, dict) and values.get("name") == "lion" and "betas" not in values:
            return {**values, "betas": LION_BETAS}
        return values

    @field_validator("groups")
    @classmethod
    def _patterns_are_valid(cls, groups: dict[str, ParameterGroup]) -> dict[str, ParameterGroup]:
        for pattern in groups:
            compile_pattern(pattern)
        return groups

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "Optim":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    @model_validator(mode="after")
    def _mup_knows_the_optimizer(self) -> "Optim":
        if self.mup is not None and self.name == "adafactor":
            raise ValueError("mup has no rule for adafactor, whose steps grow with the weights")
        decays = [self.weight_decay, *(group.weight_decay for group in self.groups.values())]
        if self.mup is not None and self.name == "adam" and any(decays):
            raise ValueError("mup has no rule for a decay in Adam's gradient: choose adamw")
        return self

    @model_validator(mode="after")
    def _schedule_has_what_it_needs(self) -> "Optim":
        if [part.steps is None for part in self.parts] != [False] * (len(self.parts) - 1) + [True]:
            raise ValueError("every part of the schedule but the last needs steps, and the last has none")
        start = 1.0
        for part in self.parts:
            if part.kind == "step" and self.decay_every is None:
                raise ValueError("the schedule step needs decay_every")
            end = self.min_lr_ratio if part.min_lr_ratio is None else part.min_lr_ratio
            if part.kind == "exponential" and 0 in (start, end):
                raise ValueError("the schedule exponential cannot start or end at 0: see min_lr_ratio")
            start = start if part.kind == "constant" else end
        return self
