"""The sections of a run's config: every key, its default and its one-line meaning, in one place."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
Factor = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A strict, frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Method(Section):
    """How weights are trained."""

    kind: Literal["full", "lora"] = Field("lora", description="full: every weight; lora: low-rank adapters")
    rank: Positive = Field(8, description="rank of the adapters")
    alpha: float = Field(16.0, gt=0, description="adapter scale: the update is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    variant: Literal["lora"] = Field("lora", description="kind of adapter")
    targets: str | list[str] = Field(
        "all-linear", description="layers that get adapters: all-linear, or names such as [q_proj, v_proj]"
    )
    layers: Positive | list[int] | None = Field(
        None, description="adapters on the last N layers, or on the layers listed; all when empty"
    )


class Objective(Section):
    """What is optimised."""

    kind: Literal["sft"] = Field("sft", description="sft: next-token loss on the supervised tokens")


class Data(Section):
    """What is read, and how records become batches."""

    train: str = Field(description="training records: a .jsonl file, or synth:NAME:N")
    valid: str | None = Field(None, description="validation records")
    test: str | None = Field(None, description="test records, evaluated once after training")
    max_length: Annotated[int, Field(gt=1)] = Field(2048, description="longest example, in tokens")
    too_long: Literal["truncate", "drop", "error"] = Field(
        "truncate", description="what happens to a longer one; truncation cuts the end"
    )
    pack: bool = Field(True, description="several examples in a row, none of which sees another")
    order: Literal["shuffle", "sequential"] = Field("shuffle", description="order of examples in an epoch")
    supervise: Literal["assistant", "last", "all"] = Field(
        "assistant", description="which tokens are learned: assistant turns, the last one, or everything"
    )


class Optim(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adam", "sgd", "lion"] = Field("adamw", description="the optimizer")
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    betas: tuple[Factor, Factor] = Field(
        (0.9, 0.999), description="averaging factors of Adam and Lion (whose paper takes 0.9 and 0.99)"
    )
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    nesterov: bool = Field(False, description="SGD looks ahead along its momentum")
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled (AdamW, Lion) or added to the gradient (Adam, SGD)"
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null does not clip")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="after the warm-up")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up from 0")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="the schedule ends at lr * min_lr_ratio")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "Optim":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
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

    name: str = Field("run", min_length=1, description="the run lands in dir/name")
    dir: str = Field("runs", description="where runs are kept")
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


class RunConfig(Section):
    """A whole run."""

    model: str = Field(description="a model's name, or the path of a directory or GGUF file")
    method: Method = Method()
    objective: Objective = Objective()
    data: Data
    optim: Optim = Optim()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    run: Run
    log: Log = Log()

    @model_validator(mode="after")
    def _early_stop_has_what_it_watches(self) -> "RunConfig":
        early = self.eval.early_stop
        if early is not None and self.data.valid is None:
            raise ValueError("eval.early_stop needs data.valid")
        if early is not None and early.metric == "exact_match" and not self.eval.generate:
            raise ValueError("eval.early_stop on exact_match needs eval.generate: true")
        return self
