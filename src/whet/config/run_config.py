"""RunConfig: all sections of a config, and the constraints across sections."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WrapValidator, model_validator

from whet.config.data import Data
from whet.config.eval import Evaluation
from whet.config.log import Log
from whet.config.method import Method
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.custom import CustomObjective, is_custom_kind
from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.mix import MixObjective
from whet.config.objectives.union import AnyObjective, SFTObjective
from whet.config.optim import LORA_B, Optim, ParameterGroup, mup_problem
from whet.config.parallel import Parallel
from whet.config.preset import Preset
from whet.config.quality import Quality, is_quality, quality_problem, with_quality_defaults
from whet.config.router_balancing import RouterBalancing
from whet.config.run import Checkpoint, Run
from whet.config.section import KeyInfo, Section, Text
from whet.errors import ConfigError

# objectives that read each record on its own
STREAMED_KINDS = ("sft", "mtp", "distill")
_CHANGEABLE = KeyInfo(may_change_on_resume=True)


def _allow_none(value: Any, validate: Any) -> Any:  # Any: pydantic's values and handler
    return None if value is None else validate(value)


def _model_tag(value: object) -> str:
    if is_quality(value):
        return "a-quality"
    return "a-preset" if isinstance(value, dict | Preset) else "a-name"


def _objective_tag(value: object) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "a-custom-objective" if is_custom_kind(kind) else "an-objective-of-whet"


class RunConfig(Section):
    """The configuration of a run. An invalid key or value raises one ConfigError that lists every problem."""

    model: Annotated[
        Annotated[Text, Tag("a-name")]
        | Annotated[Preset, Tag("a-preset")]
        | Annotated[Quality, Tag("a-quality")],
        Discriminator(_model_tag),
    ] = Field(
        description="name of a model, path of a directory or GGUF file, {preset: NAME, ...} to train from "
        "scratch, or {quality: SIZE, ...}"
    )
    method: Method = Method()
    objective: Annotated[
        Annotated[
            Annotated[AnyObjective | MixObjective, Field(discriminator="kind")], Tag("an-objective-of-whet")
        ]
        | Annotated[CustomObjective, Tag("a-custom-objective")],
        Discriminator(_objective_tag),
    ] = SFTObjective()
    # None in a mix, whose parts have their own data: use `parts()`
    data: Annotated[Data, WrapValidator(_allow_none)]
    optim: Optim = Optim()
    experts: RouterBalancing = RouterBalancing()
    eval: Evaluation = Evaluation()
    checkpoint: Annotated[Checkpoint, _CHANGEABLE] = Checkpoint()
    run: Run
    parallel: Annotated[Parallel, _CHANGEABLE] = Parallel()
    log: Annotated[Log, _CHANGEABLE] = Log()

    @property
    def directory(self) -> Path:
        """The run directory, `run.dir`/`run.name`."""
        try:
            return Path(self.run.dir).expanduser() / self.run.name
        except RuntimeError as error:
            raise ConfigError(f"run.dir: the home directory in {self.run.dir} does not exist") from error

    @property
    def language_model(self) -> str | Preset:
        """`model`, if it is a language model.

        Raises:
            ConfigError: It is a quality model.
        """
        if isinstance(self.model, Quality):
            raise ConfigError("this needs a language model, but model.quality reads rows of numbers")
        return self.model

    @property
    def optim_groups(self) -> Optim:
        """`optim`, with the learning rates of routers and LoRA+ as its last parameter groups."""
        return optim_groups(self.optim, self.method)

    def parts(self) -> dict[str, "RunConfig"]:
        """Return the config of each part of a mix by name; empty for other objectives."""
        if not isinstance(self.objective, MixObjective):
            return {}
        configs = {}
        for part in self.objective.parts:
            run = self.run
            if part.batch_size or part.batch_tokens:
                size = {"batch_size": part.batch_size, "batch_tokens": part.batch_tokens}
                run = run.model_copy(update=size)
            changes = {"objective": part.objective, "data": part.data, "run": run}
            configs[part.label] = self.model_copy(update=changes)
        return configs

    def _has(self, split: str) -> bool:
        sections = [part.data for part in self.parts().values()] or [self.data]
        return any(getattr(data, split) is not None for data in sections)

    @model_validator(mode="before")
    @classmethod
    def _default_data_of_mix(cls, values: Any) -> Any:  # Any: pydantic's
        objective = values.get("objective") if isinstance(values, dict) else None
        kind = objective.get("kind") if isinstance(objective, dict) else getattr(objective, "kind", None)
        return {"data": None, **values} if kind == "mix" else values

    @model_validator(mode="after")
    def _check_data(self) -> "RunConfig":
        if isinstance(self.objective, MixObjective):
            if self.data:
                raise ValueError("data: each part of a mix has separate data, so remove this section")
            if self.run.steps is None:
                raise ValueError("a mix has no epochs: set run.steps instead of run.epochs")
            if len({part.data.template for part in self.objective.parts}) > 1:
                raise ValueError(
                    "the parts of a mix must have the same data.template, because the model has only one: "
                    "set it in every part"
                )
        elif not self.data:
            raise ValueError("data is missing")
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_quality_defaults(cls, values: Any) -> Any:  # Any: not yet validated
        applies = isinstance(values, dict) and is_quality(values.get("model"))
        return with_quality_defaults(values) if applies else values

    @model_validator(mode="after")
    def _check_model_and_objective(self) -> "RunConfig":
        if isinstance(self.model, Quality):
            if (problem := quality_problem(dict(self))) is not None:
                raise ValueError(problem)
        elif self.objective.kind == "regression":
            raise ValueError(
                "objective.kind: regression needs a model for rows of numbers: set model.quality"
            )
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> "RunConfig":
        if isinstance(self.model, Preset) and self.method.kind != "full":
            raise ValueError("model.preset starts from random weights: set method.kind: full")
        return self

    @model_validator(mode="after")
    def _check_continue(self) -> "RunConfig":
        if self.method.continues and not isinstance(self.model, str):
            raise ValueError(
                "method.continue needs a trained adapter: set model to a run or adapter directory"
            )
        return self

    @model_validator(mode="after")
    def _check_mup(self) -> "RunConfig":
        if self.optim.mup is not None and (problem := mup_problem(self.method.kind, self.objective.kind)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_bias_rate(self) -> "RunConfig":
        if self.experts.bias_rate and self.method.kind != "full":
            raise ValueError(
                "experts.bias_rate needs method.kind: full, because adapters cannot store the router bias"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation_data(self) -> "RunConfig":
        if self.eval.every is not None and not self.has_validation and self.eval.tasks is None:
            raise ValueError("eval.every needs data.valid")
        if self.eval.generate and not self._has("valid") and not self._has("test"):
            raise ValueError("eval.generate needs data.valid or data.test")
        if self.eval.metrics and not self._has("valid") and not self._has("test"):
            raise ValueError("eval.metrics needs data.valid or data.test")
        return self

    @model_validator(mode="after")
    def _check_group(self) -> "RunConfig":
        sections = [part.data for part in self.parts().values()] or [self.data]
        is_split = isinstance(self.objective, ClassifyObjective)  # by objective.valid_share
        if any(data.group is not None and data.held_out is None and not is_split for data in sections):
            raise ValueError("data.group needs data.valid to be a share or a count of records to hold out")
        return self

    @model_validator(mode="after")
    def _check_stream(self) -> "RunConfig":
        for part in self.parts().values() or [self]:
            if part.data.stream is not None and (problem := stream_problem(part.objective, part.run)):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_early_stop(self) -> "RunConfig":
        early = self.eval.early_stop
        if early is not None and not self.has_validation and self.eval.tasks is None:
            raise ValueError("eval.early_stop needs data.valid")
        generates = self.objective.kind == "grpo"  # evaluates by generating, without a loss
        if early is not None and early.metric == "exact_match" and not (self.eval.generate or generates):
            raise ValueError("eval.early_stop on exact_match needs eval.generate: true")
        return self

    @model_validator(mode="after")
    def _check_fp8(self) -> "RunConfig":
        if self.run.fp8 and self.method.kind != "full":
            raise ValueError("run.fp8 trains all weights, so it needs method.kind: full")
        return self

    @property
    def has_validation(self) -> bool:
        """Whether there are validation records: from data.valid, or held out of data.train."""
        split_off = isinstance(self.objective, ClassifyObjective) and self.objective.valid_share > 0
        return split_off or self._has("valid")

    @model_validator(mode="after")
    def _set_default_targets(self) -> "RunConfig":
        targets = self.objective.default_targets
        if self.method.continues:
            return self
        if "targets" not in self.method.model_fields_set and self.method.targets != targets:
            method = self.method.model_copy(update={"targets": targets})
            object.__setattr__(self, "method", method)  # the section is frozen
        return self

    @model_validator(mode="after")
    def _check_classification(self) -> "RunConfig":
        if not isinstance(self.objective, ClassifyObjective):
            return self
        data = self.data
        for key, is_set in (
            ("eval.generate", self.eval.generate),
            ("eval.metrics", self.eval.metrics),
            ("eval.tasks", self.eval.tasks),
            ("data.too_long: split", data.too_long == "split"),
        ):
            if is_set:
                raise ValueError(f"{key} cannot be combined with objective.kind: classify")
        if data.format not in ("auto", "classification"):
            raise ValueError("objective.kind: classify needs data.format: classification")
        if self.objective.oversample and data.curriculum is not None:
            raise ValueError("objective.oversample cannot be combined with data.curriculum")
        if self.objective.calibrate and not self.has_validation:
            raise ValueError("objective.calibrate needs data.valid")
        return self


def stream_problem(objective: Section, run: Run) -> str | None:
    """Return why the records of an objective cannot be streamed, or None."""
    if run.steps is None:
        return "data.stream needs run.steps instead of run.epochs: the length of a stream is unknown"
    kind = getattr(objective, "kind", "")
    if isinstance(objective, DistillObjective) and objective.offline is not None:
        return "data.stream cannot be combined with objective.offline, which stores data for each record"
    if kind in STREAMED_KINDS or is_custom_kind(kind):
        return None
    return f"data.stream cannot be combined with objective.kind: {kind}, which needs all records first"


def optim_groups(optim: Optim, method: Method) -> Optim:
    """Return `optim` with the learning rates of routers and LoRA+ as its last parameter groups."""
    groups = dict(optim.add_router_group.groups)
    if method.kind != "full" and method.lr_ratio is not None:
        groups[LORA_B] = ParameterGroup(lr_scale=method.lr_ratio)
    return optim.model_copy(update={"groups": groups})
