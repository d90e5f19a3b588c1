"""The `run`, `run.budget` and `checkpoint` sections."""

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.section import KeyInfo, Positive, PrecisionName, Section, Text

_CHANGEABLE = KeyInfo(may_change_on_resume=True)
_LONGEST_NAME = 200  # file systems allow 255 bytes, and staging adds some


class Checkpoint(Section):
    """What is saved on the way."""

    every: Positive | None = Field(100, description="steps between checkpoints; null: best and last only")
    minutes: float | None = Field(None, gt=0, description="minutes after which one is due, whatever the step")
    keep: Positive = Field(2, description="newest checkpoints kept, besides the best one")
    asynchronous: bool = Field(
        True, alias="async", description="write while training goes on, from a copy in memory"
    )


class BudgetSection(Section):
    """A run whose budget is spent is done: it is evaluated, and its result is in final/."""

    flops: float | None = Field(None, gt=0, description="floating-point operations of all steps together")
    minutes: float | None = Field(
        None, gt=0, description="minutes of all steps, pauses between stop and resume left out"
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> "BudgetSection":
        if self.flops is None and self.minutes is None:
            raise ValueError("a budget needs flops, minutes or both")
        return self


class Run(Section):
    """How long, how much at once, on what."""

    name: Annotated[Text, _CHANGEABLE] = Field("run", min_length=1, description="the run lands in dir/name")
    dir: Annotated[Text, _CHANGEABLE] = Field("runs", description="where runs are kept")
    steps: Annotated[Positive | None, _CHANGEABLE] = Field(None, description="optimizer steps")
    epochs: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="passes over the data, instead of steps"
    )
    batch_size: Positive | None = Field(None, description="examples in an optimizer step")
    batch_tokens: Positive | None = Field(None, description="tokens in an optimizer step, instead")
    micro_batch_tokens: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="tokens computed at once; null: batch_tokens, at most 4096"
    )
    seed: int = Field(0, description="seed of everything random")
    device: Annotated[str, _CHANGEABLE] = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    precision: PrecisionName = Field("auto", description="number format; fp16 is for GPUs without bf16")
    fp8: bool = Field(False, description="multiply in 8 bits in the layers' products; method full")
    compile: Annotated[bool, _CHANGEABLE] = Field(False, description="torch.compile each layer")
    grad_checkpoint: Annotated[bool, _CHANGEABLE] = Field(
        False, description="recompute activations: less memory, more time"
    )
    on_nonfinite: Annotated[Literal["stop", "skip"], _CHANGEABLE] = Field(
        "stop", description="at a non-finite loss or gradient; weights stay unchanged either way"
    )
    nonfinite_limit: Annotated[Positive, _CHANGEABLE] = Field(
        10, description="with on_nonfinite skip: this many such steps in a row stop the run"
    )
    max_time: Annotated[float | None, _CHANGEABLE] = Field(
        None, gt=0, description="minutes, from its start or resume, after which the run saves and stops"
    )
    max_memory: Annotated[float | None, _CHANGEABLE] = Field(
        None, gt=0, description="GiB at which the run saves and stops"
    )
    budget: Annotated[BudgetSection | None, _CHANGEABLE] = Field(
        None, description="what the run may cost: when it is spent, it is done"
    )

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
