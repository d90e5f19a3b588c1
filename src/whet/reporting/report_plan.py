"""What a run was expected to take, planned when its report is written."""

from whet.chips import chip_called
from whet.config.load import load_config
from whet.errors import WhetError
from whet.reporting.plan_text import plan_json
from whet.reporting.run_files import CONFIG, RunFiles, Values, section
from whet.training.plan import plan_run


def plan_of(run: RunFiles) -> Values:
    """The plan of its config for the device it ran on; empty where there is none.

    Nothing of it comes from what was measured: only the kind of device is read from the run.
    """
    kind, _, name = str(section(run.provenance, "machine").get("device", "")).partition(": ")
    chip = chip_called(name) if kind == "cuda" else None
    if chip is None and kind != "cpu":
        return {}
    device = "cpu" if chip is None else chip.name
    try:
        return plan_json(plan_run(load_config(run.directory / CONFIG), device=device, suggest=False))
    except WhetError:  # a model that is not here any more, or one that has no plan
        return {}
