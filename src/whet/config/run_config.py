"""RunConfig: all sections of a config, and the rules across them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WrapValidator, model_validator

from whet.config.data import Data
from whet.config.eval import Evaluation
from whet.config.log import Log
from whet.config.method import Method
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.custom import CustomObjective, is_custom_kind
from whet.config.objectives.mix import MixObjective
from whet.config.objectives.union import AnyObjective, SFTObjective
from whet.config.optim import LORA_B, Optim, ParameterGroup, unfit_for_mup
from whet.config.parallel import Parallel
from whet.config.preset import Preset
from whet.config.quality import Quality, is_quality, unfit_key, with_quality_defaults
from whet.config.router_balancing import RouterBalancing
from whet.config.run import Checkpoint, Run
from whet.config.section import KeyInfo, Section, Text
from whet.errors import ConfigError

_CHANGEABLE = KeyInfo(may_change_on_resume=True)


def _data_or_none(value: Any, check: Any) -> Any:  # Any: pydantic's, before and after
    return None if value is None else check(value)


def _kind_of_model(value: object) -> str:
    if is_quality(value):
        return "a-quality"
    return "a-preset" if isinstance(value, dict | Preset) else "a-name"


def _kind_of_objective(value: object) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "a-custom-objective" if is_custom_kind(kind) else "an-objective-of-whet"


class RunConfig(Section):
    """A whole run."""

    model: Annotated[
        Annotated[Text, Tag("a-name")]
        | Annotated[Preset, Tag("a-preset")]
        | Annotated[Quality, Tag("a-quality")],
        Discriminator(_kind_of_model),
    ] = Field(
        description="a model's name, the path of a directory or GGUF file, {preset: NAME, ...} or "
        "{quality: SIZE, ...}"
    )
    method: Method = Method()
    objective: Annotated[
        Annotated[
            Annotated[AnyObjective | MixObjective, Field(discriminator="kind")], Tag("an-objective-of-whet")
        ]
        | Annotated[CustomObjective, Tag("a-custom-objective")],
        Discriminator(_kind_of_objective),
    ] = SFTObjective()
    # None where the parts of a mix bring their own, and those are what is read: see `parts`
    data: Annotated[Data, WrapValidator(_data_or_none)]
    optim: Optim = Optim()
    experts: RouterBalancing = RouterBalancing()
    eval: Evaluation = Evaluation()
    checkpoint: Annotated[Checkpoint, _CHANGEABLE] = Checkpoint()
    run: Run
    parallel: Annotated[Parallel, _CHANGEABLE] = Parallel()
    log: Annotated[Log, _CHANGEABLE] = Log()

    @property
    def directory(self) -> Path:
        """Where the run lands."""
        try:
            return Path(self.run.dir).expanduser() / self.run.name
        except RuntimeError as error:
            raise ConfigError(f"run.dir: {self.run.dir} is in no known home directory") from error

    @property
    def language_model(self) -> str | Preset:
        """`model`, for those who can do nothing with any other kind."""
        if isinstance(self.model, Quality):
            raise ConfigError("this needs a language model, and model.quality reads rows of numbers")
        return self.model

    @property
    def optim_groups(self) -> Optim:
        """`optim`, with the rates of routers and of LoRA+ as its last groups."""
        return optim_groups(self.optim, self.method)

    def parts(self) -> dict[str, "RunConfig"]:
        """Each part of a mix as a run of its own, by name; none where the objective is no mix."""
        if not isinstance(self.objective, MixObjective):
            return {}
        found = {}
        for part in self.objective.parts:
            run = self.run
            if part.batch_size or part.batch_tokens:
                size = {"batch_size": part.batch_size, "batch_tokens": part.batch_tokens}
                run = run.model_copy(update=size)
            changes = {"objective": part.objective, "data": part.data, "run": run}
            found[part.called] = self.model_copy(update=changes)
        return found

    def _has(self, split: str) -> bool:
        every = [part.data for part in self.parts().values()] or [self.data]
        return any(getattr(data, split) is not None for data in every)

    @model_validator(mode="before")
    @classmethod
    def _a_mix_has_no_data(cls, values: Any) -> Any:  # Any: pydantic's
        objective = values.get("objective") if isinstance(values, dict) else None
        kind = objective.get("kind") if isinstance(objective, dict) else getattr(objective, "kind", None)
        return {"data": None, **values} if kind == "mix" else values

    @model_validator(mode="after")
    def _data_has_one_place(self) -> "RunConfig":
        if isinstance(self.objective, MixObjective):
            if self.data:
                raise ValueError("data: each part of a mix has its own, so leave this one out")
            if self.run.steps is None:
                raise ValueError("a mix is counted in steps: set run.steps instead of run.epochs")
        elif not self.data:
            raise ValueError("data is missing")
        return self

    @model_validator(mode="before")
    @classmethod
    def _quality_has_defaults_of_its_own(cls, values: Any) -> Any:  # Any: not yet checked
        named = isinstance(values, dict) and is_quality(values.get("model"))
        return with_quality_defaults(values) if named else values

    @model_validator(mode="after")
    def _model_and_objective_fit(self) -> "RunConfig":
        if isinstance(self.model, Quality):
            if (problem := unfit_key(dict(self))) is not None:
                raise ValueError(problem)
        elif self.objective.kind == "regression":
            raise ValueError("objective.kind regression needs rows of numbers: see model.quality")
        return self

    @model_validator(mode="after")
    def _new_weights_are_trained(self) -> "RunConfig":
        if isinstance(self.model, Preset) and self.method.kind != "full":
            raise ValueError("model.preset starts from random weights: set method.kind to full")
        return self

    @model_validator(mode="after")
    def _mup_knows_every_weight(self) -> "RunConfig":
        if self.optim.mup is not None and (why := unfit_for_mup(self.method.kind, self.objective.kind)):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _a_balanced_bias_can_be_saved(self) -> "RunConfig":
        if self.experts.bias_rate and self.method.kind != "full":
            raise ValueError("experts.bias_rate needs method.kind full: adapters cannot hold the bias")
        return self

    @model_validator(mode="after")
    def _evaluations_have_records(self) -> "RunConfig":
        if self.eval.every is not None and not self.holds_out:
            raise ValueError("eval.every needs data.valid")
        if self.eval.generate and not self._has("valid") and not self._has("test"):
            raise ValueError("eval.generate needs data.valid or data.test")
        if self.eval.metrics and not self._has("valid") and not self._has("test"):
            raise ValueError("eval.metrics needs data.valid or data.test")
        return self

    @model_validator(mode="after")
    def _early_stop_has_what_it_watches(self) -> "RunConfig":
        early = self.eval.early_stop
        if early is not None and not self.holds_out:
            raise ValueError("eval.early_stop needs data.valid")
        rewarded = self.objective.kind == "grpo"  # which generates in every evaluation, and has no loss there
        if early is not None and early.metric == "exact_match" and not (self.eval.generate or rewarded):
            raise ValueError("eval.early_stop on exact_match needs eval.generate: true")
        return self

    @model_validator(mode="after")
    def _eight_bits_are_for_every_weight(self) -> "RunConfig":
        if self.run.fp8 and self.method.kind != "full":
            raise ValueError("run.fp8 is for training every weight: it needs method.kind: full")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether there are validation records, given or held out of the training ones."""
        own = isinstance(self.objective, ClassifyObjective) and self.objective.valid_share > 0
        return own or self._has("valid")

    @model_validator(mode="after")
    def _objective_chooses_targets(self) -> "RunConfig":
        targets = self.objective.default_targets
        if "targets" not in self.method.model_fields_set and self.method.targets != targets:
            method = self.method.model_copy(update={"targets": targets})
            object.__setattr__(self, "method", method)  # frozen for everyone else
        return self

    @model_validator(mode="after")
    def _classification_fits(self) -> "RunConfig":
        if not isinstance(self.objective, ClassifyObjective):
            return self
        data = self.data
        for key, given in (
            ("eval.generate", self.eval.generate),
            ("eval.metrics", self.eval.metrics),
            ("data.too_long: split", data.too_long == "split"),
        ):
            if given:
                raise ValueError(f"{key} does not go with objective.kind: classify")
        if data.format not in ("auto", "classification"):
            raise ValueError("objective.kind: classify reads data.format: classification")
        if self.objective.oversample and data.curriculum is not None:
            raise ValueError("objective.oversample does not go with data.curriculum")
        if self.objective.calibrate and not self.holds_out:
            raise ValueError("objective.calibrate needs data.valid")
        return self


def optim_groups(optim: Optim, method: Method) -> Optim:
    """Return the optimizer's section with the rates of routers and of LoRA+ as its last groups."""
    groups = dict(optim.with_router_group.groups)
    if method.kind != "full" and method.lr_ratio is not None:
        groups[LORA_B] = ParameterGroup(lr_scale=method.lr_ratio)
    return optim.model_copy(update={"groups": groups})
