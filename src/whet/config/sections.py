"""The sections of a run's config: every key, its default and its one-line meaning, in one place."""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from whet.config.method import Method
from whet.config.objectives import AnyObjective, SFTObjective
from whet.config.preset import Preset
from whet.config.quality import Quality, is_quality, unfit_key, with_quality_defaults
from whet.config.section import Factor, Positive, Section, Text
from whet.errors import ConfigError


class WeightedSource(Section):
    """One of several sources that are mixed."""

    source: str = Field(description="a file, directory, hf:NAME or synth:NAME:N")
    weight: float = Field(gt=0, description="its share of the records, relative to the others")


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

    @model_validator(mode="after")
    def _hard_is_known(self) -> "Curriculum":
        if self.kind == "difficulty" and (self.score is None) == (self.hard is None):
            raise ValueError("a curriculum by difficulty needs either score or hard")
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

    @field_validator("train", "valid", "test")
    @classmethod
    def _at_least_one(cls, value: Sources | None) -> Sources | None:
        if value is not None and not value:
            raise ValueError("name at least one source")
        return value


ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "step", "wsd"]


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


class Optim(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"] = Field(
        "adamw", description="the optimizer; adamw8bit needs whet[bitsandbytes]"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    betas: tuple[Factor, Factor] = Field(
        (0.9, 0.999), description="averaging factors of Adam(W) and Lion (whose paper takes 0.9 and 0.99)"
    )
    eps: float = Field(1e-8, gt=0, description="Adam(W)'s epsilon")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    nesterov: bool = Field(False, description="SGD looks ahead along its momentum")
    weight_decay: float = Field(
        0.0, ge=0, description="of matrices; added to the gradient by Adam and SGD, decoupled in all others"
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null does not clip")
    schedule: ScheduleKind | list[SchedulePart] = Field(
        "cosine", description="after the warm-up: one schedule, or a list of parts in a row"
    )
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up from 0")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="the schedule ends at lr * min_lr_ratio")
    decay_every: Positive | None = Field(None, description="step: updates from one decay to the next")
    decay_factor: float = Field(0.5, gt=0, lt=1, description="step: what the rate is then multiplied by")
    decay_fraction: float = Field(
        0.1, gt=0, le=1, description="wsd: the share of the run's steps over which the rate falls"
    )
    groups: dict[str, ParameterGroup] = Field(
        {},
        description="other settings for parameters by name: {regular expression: {lr_scale, weight_decay}}",
    )

    @property
    def parts(self) -> list[SchedulePart]:
        """The schedule as a list, however it was given."""
        return [SchedulePart(kind=self.schedule)] if isinstance(self.schedule, str) else self.schedule

    @field_validator("groups")
    @classmethod
    def _patterns_are_valid(cls, groups: dict[str, ParameterGroup]) -> dict[str, ParameterGroup]:
        for pattern in groups:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return groups

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "Optim":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
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


class EarlyStop(Section):
    """When to stop because nothing improves."""

    metric: Literal["eval_loss", "eval_perplexity", "exact_match"] = Field(
        "eval_loss", description="what must improve; exact_match needs eval.generate"
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
    precision: Literal["auto", "fp32", "bf16", "bf16-pure", "fp16"] = Field(
        "auto", description="number format; fp16 is for GPUs without bf16"
    )
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

    @field_validator("name")
    @classmethod
    def _one_path_segment(cls, value: str) -> str:
        if value in (".", "..") or "/" in value or "\\" in value:
            raise ValueError("a run's name is one path segment; put the rest into run.dir")
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> "Run":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("give either batch_size or batch_tokens")
        return self


class Log(Section):
    """What is written while it runs."""

    every: Positive = Field(1, description="steps between training rows of metrics.jsonl")


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
    objective: AnyObjective = SFTObjective()
    data: Data
    optim: Optim = Optim()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    run: Run
    log: Log = Log()

    @property
    def language_model(self) -> str | Preset:
        """`model`, for those who can do nothing with any other kind."""
        if isinstance(self.model, Quality):
            raise ConfigError("this needs a language model, and model.quality reads rows of numbers")
        return self.model

    @property
    def optim_groups(self) -> Optim:
        """`optim`, with the rate of LoRA+ as its last group."""
        if self.method.kind == "full" or self.method.lr_ratio is None:
            return self.optim
        groups = {
            **self.optim.groups,
            r"\.lora_(embedding_)?B(\.|$)": ParameterGroup(lr_scale=self.method.lr_ratio),
        }
        return self.optim.model_copy(update={"groups": groups})

    @model_validator(mode="before")
    @classmethod
    def _quality_has_defaults_of_its_own(cls, values: Any) -> Any:  # Any: not yet checked
        named = isinstance(values, dict) and is_quality(values.get("model"))
        return with_quality_defaults(values) if named else values

    @model_validator(mode="after")
    def _model_and_objective_fit(self) -> "RunConfig":
        if isinstance(self.model, Quality):
            if (problem := unfit_key(dict(self))) is not None:
                raise ValueError(f"{problem}: model.quality reads rows of numbers")
        elif self.objective.kind == "regression":
            raise ValueError("objective.kind regression needs rows of numbers: see model.quality")
        return self

    @model_validator(mode="after")
    def _new_weights_are_trained(self) -> "RunConfig":
        if isinstance(self.model, Preset) and self.method.kind != "full":
            raise ValueError("model.preset starts from random weights: set method.kind to full")
        return self

    @model_validator(mode="after")
    def _evaluations_have_records(self) -> "RunConfig":
        if self.eval.every is not None and self.data.valid is None:
            raise ValueError("eval.every needs data.valid")
        if self.eval.generate and self.data.valid is None and self.data.test is None:
            raise ValueError("eval.generate needs data.valid or data.test")
        return self

    @model_validator(mode="after")
    def _early_stop_has_what_it_watches(self) -> "RunConfig":
        early = self.eval.early_stop
        if early is not None and self.data.valid is None:
            raise ValueError("eval.early_stop needs data.valid")
        if early is not None and early.metric == "exact_match" and not self.eval.generate:
            raise ValueError("eval.early_stop on exact_match needs eval.generate: true")
        return self
