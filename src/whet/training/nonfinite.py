"""Steps whose loss or gradient is not finite: what is kept of them, and whether the run stops."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from whet.data.batches import Batch
from whet.errors import RunError, StorageError
from whet.storage import replace_text
from whet.training.settings import TrainSettings

log = logging.getLogger("whet")


def report_nonfinite(
    step: int,
    micro_batches: Sequence[Batch],
    directory: Path | None,
    settings: TrainSettings,
    *,
    loss: float,
    norm: float,
    in_a_row: int,
) -> RunError | None:
    """Keep the batch of a step that made no update; warn, or return the error to stop with."""
    message = f"step {step}: loss {loss}, gradient norm {norm}: the weights were left as they were"
    if directory is not None:
        message += f"; {_keep_batch(directory, step, micro_batches, loss=loss, norm=norm)}"
    if settings.on_nonfinite == "skip" and in_a_row < settings.nonfinite_limit:
        log.warning(message)
        return None
    if settings.on_nonfinite == "skip":
        limit = settings.nonfinite_limit
        message += f"; {in_a_row} such steps in a row, and run.nonfinite_limit is {limit}"
    return RunError(
        message, hint="look at the records, set run.on_nonfinite to skip, or start anew with a lower optim.lr"
    )


def _keep_batch(
    directory: Path, step: int, micro_batches: Sequence[Batch], *, loss: float, norm: float
) -> str:
    """Write the records and tokens of a step into its run; returns where they are, or why they are not."""
    path = directory / f"nonfinite-step-{step:06d}.json"
    culprits = [{"records": batch.origins, "tokens": batch.tokens.tolist()} for batch in micro_batches]
    contents = {"loss": str(loss), "grad_norm": str(norm), "micro_batches": culprits}
    try:
        replace_text(path, json.dumps(contents, indent=2) + "\n")
    except StorageError as error:
        return error.message
    return f"the batch is in {path}"
