"""Steps with a non-finite loss or gradient: save the batch, then warn or stop."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from whet.data.batches import Batch
from whet.errors import RunError, StorageError
from whet.storage import replace_text
from whet.training.settings import TrainSettings
from whet.training.state import RunState

log = logging.getLogger("whet")


def report_nonfinite(
    state: RunState,
    micro_batches: Sequence[Batch],
    directory: Path | None,
    settings: TrainSettings,
    *,
    loss: float,
    norm: float,
) -> RunError | None:
    """Save the batch of a skipped step, and log a warning or return the error to stop with.

    Args:
        state: The state of the run before the step.
        micro_batches: The micro-batches of the step.
        directory: Where to save the batch; None to not save it.
        settings: `on_nonfinite` and `nonfinite_limit` decide between a warning and an error.
        loss: The loss of the step.
        norm: The gradient norm of the step.
    """
    step, in_a_row = state.step + 1, state.nonfinite_in_a_row + 1
    message = (
        f"step {step}: loss {loss}, gradient norm {norm}; the update was skipped, the weights are unchanged"
    )
    if directory is not None:
        message += f"; {_save_batch(directory, step, micro_batches, loss=loss, norm=norm)}"
    if settings.on_nonfinite == "skip" and in_a_row < settings.nonfinite_limit:
        log.warning(message)
        return None
    if settings.on_nonfinite == "skip":
        limit = settings.nonfinite_limit
        message += f"; {in_a_row} consecutive non-finite steps reach run.nonfinite_limit ({limit})"
    return RunError(
        message, hint="inspect the records, set run.on_nonfinite=skip, or restart with a lower optim.lr"
    )


def _save_batch(
    directory: Path, step: int, micro_batches: Sequence[Batch], *, loss: float, norm: float
) -> str:
    """Write the records and tokens of a step to the run directory; return the path, or why writing failed."""
    path = directory / f"nonfinite-step-{step:06d}.json"
    saved_batches = [{"records": batch.origins, "tokens": batch.tokens.tolist()} for batch in micro_batches]
    contents = {"loss": str(loss), "grad_norm": str(norm), "micro_batches": saved_batches}
    try:
        replace_text(path, json.dumps(contents, indent=2) + "\n")
    except StorageError as error:
        return error.message
    return f"the batch is saved in {path}"
