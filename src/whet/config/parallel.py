"""The `parallel` section: data, fully sharded and tensor parallelism."""

from typing import Literal

from pydantic import Field, model_validator

from whet.config.section import Positive, Section
from whet.errors import ConfigError


class Parallel(Section):
    """Distributed training, started by torchrun or --nproc. run.batch_size is the global batch size."""

    kind: Literal["none", "ddp", "fsdp"] = Field(
        "none",
        description="none: one process; ddp: split each batch and replicate the weights; "
        "fsdp: split each batch and shard weights, gradients and optimizer state",
    )
    tensor: Positive = Field(
        1, description="fsdp: tensor-parallel degree; must divide the number of processes; 1: none"
    )
    timeout: float = Field(
        50.0,
        gt=0,
        description="seconds without a heartbeat from a process, after the first step, until all are stopped",
    )

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> "Parallel":
        if self.tensor > 1 and self.kind != "fsdp":
            raise ValueError("tensor > 1 needs kind: fsdp")
        return self

    def check_processes(self, count: int) -> None:
        """Raise a ConfigError if these settings do not work with this number of processes."""
        if count > 1 and self.kind == "none":
            raise ConfigError(
                f"{count} processes but parallel.kind is none: each would train a separate model",
                hint="set parallel.kind=ddp (or fsdp), or start one process",
            )
        if count % self.tensor:
            raise ConfigError(
                f"parallel.tensor={self.tensor} does not divide the {count} processes",
                hint=f"start a multiple of {self.tensor} processes",
            )
