"""Runs that belong together: each begun, gone on with, or left as it is."""

from collections.abc import Iterable

from whet.config.load import load_config, to_dict
from whet.config.sections import RunConfig
from whet.errors import CheckpointError
from whet.storage import clear_leftovers
from whet.training.callbacks import Callback
from whet.training.resuming import differences, refuse_changes
from whet.training.run import resume, train

# what a run may change on its way, and runs that are compared must have in common
_SHARED = ("run.steps", "run.epochs", "run.budget", "eval.batches", "eval.max_new_tokens")


def finish(plan: RunConfig, callbacks: Iterable[Callback]) -> bool:
    """Run it, or go on with it; whether it came to its end."""
    directory = plan.directory
    clear_leftovers(directory.parent, of=directory.name)
    begun = (directory / "config.yaml").is_file()
    if begun:
        refuse_other_plan(plan)
    result = resume(directory, callbacks) if begun else train(plan, callbacks)
    return not result.unfinished


def refuse_other_plan(plan: RunConfig) -> None:
    """What is there must be the run that is meant, as long as the others and judged as they are."""
    directory = plan.directory
    there = to_dict(load_config(directory / "config.yaml"))
    refuse_changes(there, plan, directory)
    if other := [key for key in differences(there, to_dict(plan)) if key.startswith(_SHARED)]:
        raise CheckpointError(
            f"{directory} has another {' and '.join(other)} than the runs it belongs to",
            hint="choose another name for all of them (run.name=...)",
        )
