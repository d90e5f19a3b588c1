"""The sections of a run's config: every key, its default and its one-line meaning, in one place."""

import os
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WrapValidator, field_validator, model_validator

from whet.config.budget import Budget
from whet.config.classify import ClassifyObjective
from whet.config.experts import Experts
from whet.config.grpo import GRPOObjective
from whet.config.log import Log
from whet.config.method import Method
from whet.config.objectives import AnyObjective, RegressionObjective, SFTObjective
from whet.config.optim import LORA_B, Optim, ParameterGroup, unfit_for_mup
from whet.config.parallel import Parallel
from whet.config.preset import Preset
from whet.config.quality import Quality, is_quality, unfit_key, with_quality_defaults
from whet.config.section import Positive, PrecisionName, Section, Text
from whet.errors import ConfigError

_LONGEST_NAME = 200  # file systems allow 255 bytes, and staging adds some


class WeightedSource(Section):
    """One of several sources that are mixed."""

    source: str = Field(description="a file, directory, hf:NAME or synth:NAME:N")
    weight: float = Field(gt=0, description="its share of the records, relative to the others")


_IN_A_FILE = "write the records to a JSON Lines file, one object per line, and give its path"


def _names_or_a_list(value: Any) -> Any:  # Any: YAML values
    if isinstance(value, dict | WeightedSource):
        raise ValueError("write a name, a list of names, or a list of {source, weight}: not one mapping")
    if isinstance(value, list) and any(isinstance(each, dict) and "source" not in each for each in value):
        raise ValueError(
            "a mapping in this list has no source: an item is a name or {source: NAME, weight: NUMBER}. "
            f"Records in memory are not a source: {_IN_A_FILE}"
        )
    if value is not None and not isinstance(value, str | int | float | date | Path | list):
        raise ValueError(f"an object of type {type(value).__name__} is not a source: {_IN_A_FILE}")
    return value


Sources = Text | list[Text] | list[WeightedSource]


class Curriculum(Section):
    """An order of examples that changes during the run."""

    kind: Literal["length", "difficulty"] = Field(description="from short to long, or from easy to hard")
    stages: Positive = Field(4, description="length: limits that rise evenly to the longest example")
    steps: Positive | None = Field(
        None, description="length: steps of a stage; null: the stages together take half of the run"
    )
    shortest: Annotated[int, Field(gt=1)] = Field(32, description="length: tokens of the first stage's limit")
    score: str | None = Field(
        None, description="difficulty: a field of the records; those above its median are hard"
    )
    hard: Sources | None = Field(
        None, description="difficulty: hard records, when data.train is the easy ones"
    )
    ramp: float = Field(
        0.5, ge=0, le=1, description="difficulty: share of the run after which all examples are hard"
    )

    _sources = field_validator("hard", mode="before")(_names_or_a_list)

    @model_validator(mode="after")
    def _hard_is_known(self) -> "Curriculum":
        if self.kind == "difficulty" and (self.score is None) == (self.hard is None):
            raise ValueError("a curriculum by difficulty needs either score or hard")
        if self.kind == "length" and self.hard is not None:
            raise ValueError("hard is for a curriculum by difficulty: one by length orders data.train alone")
        return self


class Data(Section):
    """What is read, and how records become batches."""

    train: Sources = Field(
        description="training records: a file, directory, hf:NAME or synth:NAME:N; a list of them; "
        "or a list of {source, weight}, mixed"
    )
    valid: Sources | None = Field(None, description="validation records, named in the same ways")
    test: Sources | None = Field(None, description="test records, evaluated once after training")
    format: Literal[
        "auto",
        "messages",
        "preference",
        "completion",
        "classification",
        "tabular",
        "distrust",
        "text",
        "prompt",
    ] = Field("auto", description="the shape records are taken as; auto: the first that their fields fit")
    on_bad_record: Literal["error", "skip"] = Field(
        "error", description="a record that cannot be read: stop, or leave it out and count it"
    )
    ignore: list[str] = Field(
        [],
        description="fields of records and messages that are not read, and not reported as unread",
    )
    allow_empty_answers: bool = Field(
        False, description="supervise answers of which no text reaches the model, instead of refusing them"
    )
    max_length: Annotated[int, Field(gt=1)] = Field(2048, description="longest example, in tokens")
    too_long: Literal["truncate", "drop", "split", "error"] = Field(
        "truncate", description="a longer one is cut at its end, dropped, split into windows, or refused"
    )
    pack: bool = Field(True, description="several examples in a row, none of which sees another")
    order: Literal["shuffle", "sequential", "mlx"] = Field(
        "shuffle", description="order of examples in an epoch; mlx: the batches of mlx-lm"
    )
    curriculum: Curriculum | None = Field(None, description="an order that changes during the run")
    supervise: Literal["assistant", "last", "all"] = Field(
        "assistant", description="which tokens are learned: assistant turns, the last one, or everything"
    )

    _sources = field_validator("train", "valid", "test", mode="before")(_names_or_a_list)

    @field_validator("train", "valid", "test")
    @classmethod
    def _at_least_one(cls, value: Sources | None) -> Sources | None:
        if value is not None and not value:
            raise ValueError("name at least one source")
        return value

    @model_validator(mode="after")
    def _curriculum_has_an_order(self) -> "Data":
        if self.order == "mlx" and self.curriculum is not None and self.curriculum.kind == "difficulty":
            raise ValueError("order: mlx does not go with a curriculum by difficulty: it makes its own steps")
        return self


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


class MixObjective(Section):
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


class EarlyStop(Section):
    """When to stop because nothing improves."""

    metric: Text = Field(
        "eval_loss",
        description="what must improve, of an evaluation's row; losses and divergences fall, scores rise",
    )
    patience: Positive = Field(3, description="evaluations without improvement before the run stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as one")


class Evaluation(Section):
    """Evaluation during a run: before the first step, at intervals, after the last."""

    every: Positive | None = Field(None, description="steps between evaluations; null: first and last only")
    batches: Positive | None = Field(
        None, description="validation loss on at most this many micro-batches; null: the whole set"
    )
    generate: bool = Field(False, description="also exact match: generate each answer and compare")
    max_new_tokens: Positive = Field(256, description="longest generated answer")
    early_stop: EarlyStop | None = Field(None, description="stop when a metric no longer improves")


class Checkpoint(Section):
    """What is saved on the way."""

    every: Positive | None = Field(100, description="steps between checkpoints; null: best and last only")
    minutes: float | None = Field(None, gt=0, description="minutes after which one is due, whatever the step")
    keep: Positive = Field(2, description="newest checkpoints kept, besides the best one")
    asynchronous: bool = Field(
        True, alias="async", description="write while training goes on, from a copy in memory"
    )


class Run(Section):
    """How long, how much at once, on what."""

    name: Text = Field("run", min_length=1, description="the run lands in dir/name")
    dir: Text = Field("runs", description="where runs are kept")
    steps: Positive | None = Field(None, description="optimizer steps")
    epochs: Positive | None = Field(None, description="passes over the data, instead of steps")
    batch_size: Positive | None = Field(None, description="examples in an optimizer step")
    batch_tokens: Positive | None = Field(None, description="tokens in an optimizer step, instead")
    micro_batch_tokens: Positive | None = Field(
        None, description="tokens computed at once; null: batch_tokens, at most 4096"
    )
    seed: int = Field(0, description="seed of everything random")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    precision: PrecisionName = Field("auto", description="number format; fp16 is for GPUs without bf16")
    fp8: bool = Field(False, description="multiply in 8 bits in the layers' products; method full")
    compile: bool = Field(False, description="torch.compile each layer")
    grad_checkpoint: bool = Field(False, description="recompute activations: less memory, more time")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="at a non-finite loss or gradient; weights stay unchanged either way"
    )
    nonfinite_limit: Positive = Field(
        10, description="with on_nonfinite skip: this many such steps in a row stop the run"
    )
    max_time: float | None = Field(
        None, gt=0, description="minutes, from its start or resume, after which the run saves and stops"
    )
    max_memory: float | None = Field(None, gt=0, description="GiB at which the run saves and stops")
    budget: Budget | None = Field(None, description="what the run may cost: when it is spent, it is done")

    @field_validator("name")
    @classmethod
    def _one_path_segment(cls, value: str) -> str:
        if value in (".", "..") or "/" in value or "\\" in value:
            raise ValueError("a run's name is one path segment; put the rest into run.dir")
        if len(os.fsencode(value)) > _LONGEST_NAME:
            raise ValueError(f"a run's name has at most {_LONGEST_NAME} bytes")
        return value

    @field_validator("name", "dir")
    @classmethod
    def _can_be_a_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot have a zero byte in it")
        return value

    @field_validator("seed")
    @classmethod
    def _torch_takes_the_seed(cls, value: int) -> int:
        if not -(2**63) <= value < 2**63:  # the seeds of a sweep are a little larger, and torch ends at 2**64
            raise ValueError("a seed is from -2**63 to 2**63 - 1")
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> "Run":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("give either batch_size or batch_tokens")
        return self


def _data_or_none(value: Any, check: Any) -> Any:  # Any: pydantic's, before and after
    return None if value is None else check(value)


def _kind_of_model(value: object) -> str:
    if is_quality(value):
        return "a-quality"
    return "a-preset" if isinstance(value, dict | Preset) else "a-name"


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
    objective: Annotated[AnyObjective | MixObjective, Field(discriminator="kind")] = SFTObjective()
    # None where the parts of a mix bring their own, and those are what is read: see `parts`
    data: Annotated[Data, WrapValidator(_data_or_none)]
    optim: Optim = Optim()
    experts: Experts = Experts()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    run: Run
    parallel: Parallel = Parallel()
    log: Log = Log()

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
        groups = dict(self.optim.with_router_group.groups)
        if self.method.kind != "full" and self.method.lr_ratio is not None:
            groups[LORA_B] = ParameterGroup(lr_scale=self.method.lr_ratio)
        return self.optim.model_copy(update={"groups": groups})

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
    def _classification_fits(self) -> "RunConfig":
        if not isinstance(self.objective, ClassifyObjective):
            return self
        if "targets" not in self.method.model_fields_set:
            method = self.method.model_copy(update={"targets": "qv"})
            object.__setattr__(self, "method", method)  # frozen for everyone else
        data = self.data
        for key, given in (
            ("eval.generate", self.eval.generate),
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
