"""What is kept of a step whose loss or gradient is not finite: enough to find out why."""

import json
from collections.abc import Sequence
from pathlib import Path

from whet.data.batches import Batch
from whet.errors import StorageError
from whet.storage import replace_text


def keep_batch(
    directory: Path, step: int, micro_batches: Sequence[Batch], *, loss: float, norm: float
) -> str:
    """Write the records and tokens of a step beside its run; say where they are, or why they are not."""
    path = directory / f"nonfinite-step-{step:06d}.json"
    culprits = [{"records": batch.origins, "tokens": batch.tokens.tolist()} for batch in micro_batches]
    found = {"loss": str(loss), "grad_norm": str(norm), "micro_batches": culprits}
    try:
        replace_text(path, json.dumps(found, indent=2) + "\n")
    except StorageError as error:
        return error.message
    return f"the batch is in {path}"
