"""The `run`, `run.budget` and `checkpoint` sections."""

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.section import KeyInfo, Positive, PrecisionName, Section, Text

_CHANGEABLE = KeyInfo(may_change_on_resume=True)
_MAX_NAME_BYTES = 200  # file systems allow 255 bytes, and the staging name adds some


class Checkpoint(Section):
    """Checkpoints during a run."""

    every: Positive | None = Field(
        100, description="steps between checkpoints; null: only the best and the last one"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="also save a checkpoint this many minutes after the last one; null: by steps only",
    )
    keep: Positive = Field(
        2, description="number of most recent checkpoints to keep, in addition to the best one"
    )
    asynchronous: bool = Field(
        True, alias="async", description="write checkpoints in the background, from a copy in memory"
    )


class BudgetSection(Section):
    """A compute or time budget. A run that reaches it ends as finished, with its evaluation and final/."""

    flops: float | None = Field(
        None, gt=0, description="total floating-point operations of all steps; null: no limit"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="total minutes of training, without pauses between stop and resume; null: no limit",
    )

    @model_validator(mode="after")
    def _check_limit(self) -> "BudgetSection":
        if self.flops is None and self.minutes is None:
            raise ValueError("a budget needs flops, minutes or both")
        return self


class Run(Section):
    """Length, batch size, device, precision and limits of the run."""

    name: Annotated[Text, _CHANGEABLE] = Field(
        "run", min_length=1, description="name of the run; its directory is dir/name"
    )
    dir: Annotated[Text, _CHANGEABLE] = Field("runs", description="parent directory of the run directory")
    steps: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="number of optimizer steps; set this or epochs"
    )
    epochs: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="number of passes over the training data; set this or steps"
    )
    batch_size: Positive | None = Field(
        None, description="examples per optimizer step, over all devices; set this or batch_tokens"
    )
    batch_tokens: Positive | None = Field(
        None, description="tokens per optimizer step, over all devices; set this or batch_size"
    )
    micro_batch_tokens: Annotated[Positive | None, _CHANGEABLE] = Field(
        None,
        description="tokens per micro-batch, padding included; null: batch_tokens, at most 4096",
    )
    seed: int = Field(0, description="random seed for initialization, shuffling, dropout and sampling")
    device: Annotated[str, _CHANGEABLE] = Field(
        "auto", description="auto, cpu, cuda, cuda:N or mps; auto: cuda, else mps, else cpu"
    )
    precision: PrecisionName = Field(
        "auto",
        description="compute dtype, with fp32 trained weights except in bf16-pure; auto: bf16 with hardware "
        "support, else fp32; fp16 is for GPUs without bf16",
    )
    fp8: bool = Field(False, description="compute the layers' matmuls in fp8; needs method.kind: full")
    compile: Annotated[bool, _CHANGEABLE] = Field(False, description="compile each layer with torch.compile")
    grad_checkpoint: Annotated[bool, _CHANGEABLE] = Field(
        False, description="recompute activations in the backward pass: less memory, more compute"
    )
    on_nonfinite: Annotated[Literal["stop", "skip"], _CHANGEABLE] = Field(
        "stop",
        description="on a non-finite loss or gradient: stop the run, or skip the step, without an update",
    )
    nonfinite_limit: Annotated[Positive, _CHANGEABLE] = Field(
        10, description="with on_nonfinite: skip, consecutive skipped steps that stop the run"
    )
    max_time: Annotated[float | None, _CHANGEABLE] = Field(
        None,
        gt=0,
        description="minutes since start or resume after which the run saves a checkpoint and stops; "
        "null: no limit",
    )
    max_memory: Annotated[float | None, _CHANGEABLE] = Field(
        None,
        gt=0,
        description="GiB of memory in use at which the run saves a checkpoint and stops; null: no limit",
    )
    budget: Annotated[BudgetSection | None, _CHANGEABLE] = Field(
        None, description="compute or time budget after which the run counts as finished; null: no budget"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value in (".", "..") or "/" in value or "\\" in value:
            raise ValueError(
                "the name of a run must be a single path component: put directories into run.dir"
            )
        if len(os.fsencode(value)) > _MAX_NAME_BYTES:
            raise ValueError(f"the name of a run can have at most {_MAX_NAME_BYTES} bytes")
        return value

    @field_validator("name", "dir")
    @classmethod
    def _check_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot contain a null byte")
        return value

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, value: int) -> int:
        if not -(2**63) <= value < 2**63:  # torch accepts up to 2**64; sweeps add to the seed
            raise ValueError("must be between -2**63 and 2**63 - 1")
        return value

    @model_validator(mode="after")
    def _check_length_and_batch(self) -> "Run":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set either steps or epochs")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("set either batch_size or batch_tokens")
        return self
