"""Runs that belong together: each begun, gone on with, or left as it is."""

from collections.abc import Iterable

from whet.config.load import load_config, to_dict
from whet.config.sections import RunConfig
from whet.storage import clear_leftovers
from whet.training.callbacks import Callback
from whet.training.resuming import refuse_changes
from whet.training.run import resume, train


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
    """What is there must be the run that is meant."""
    directory = plan.directory
    refuse_changes(to_dict(load_config(directory / "config.yaml")), plan, directory)
