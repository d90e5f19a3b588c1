"""How a run is spread over processes."""

from typing import Literal

from pydantic import Field, model_validator

from whet.config.section import Positive, Section
from whet.errors import ConfigError


class Parallel(Section):
    """One run on several processes, which torchrun or --nproc starts; run.batch_size counts all of them."""

    kind: Literal["none", "ddp", "fsdp"] = Field(
        "none",
        description="none: one process; ddp: each has all weights and a share of every step; "
        "fsdp: each has a share of the weights, too",
    )
    tensor: Positive = Field(
        1, description="fsdp: processes that compute each layer together; divides their number"
    )
    timeout: float = Field(
        50.0,
        gt=0,
        description="Seconds without a sign from a process, after the first step, until all are ended",
    )

    @model_validator(mode="after")
    def _layers_are_cut_with_fsdp(self) -> "Parallel":
        if self.tensor > 1 and self.kind != "fsdp":
            raise ValueError("tensor needs kind: fsdp")
        return self

    def check_processes(self, count: int) -> None:
        """Refuse a number of processes that these settings cannot be spread over."""
        if count > 1 and self.kind == "none":
            raise ConfigError(
                f"{count} processes, and parallel.kind is none: each would train alone",
                hint="set parallel.kind=ddp (or fsdp), or start one process",
            )
        if count % self.tensor:
            raise ConfigError(
                f"parallel.tensor={self.tensor} does not divide the {count} processes",
                hint="start a multiple of it",
            )
