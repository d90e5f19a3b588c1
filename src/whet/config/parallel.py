"""How a run is spread over processes."""

from typing import Literal

from pydantic import Field

from whet.config.section import Positive, Section


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
