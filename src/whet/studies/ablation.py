"""Ablation of the quality task: train every arm with every seed on the same rows in the same order."""

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from whet.config.load_config import to_dict, validate_config
from whet.config.quality import ROUTER, Quality
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, RunError
from whet.recipes.quality.tabular_model import QualitySpec, TabularModel
from whet.run_directory import CONFIG_FILE, PROVENANCE_FILE, is_finished, read_summary
from whet.storage import read_json
from whet.studies.sweep import check_existing_run, train_or_resume
from whet.training.callbacks import Callback

log = logging.getLogger("whet")

METRIC = "eval_loss"


@dataclass(frozen=True)
class ArmRun:
    """One finished run of an ablation."""

    arm: str
    seed: int
    directory: str
    value: float  # METRIC after the last step
    reused: bool  # it had already finished


@dataclass(frozen=True)
class Ablation:
    """The runs of an ablation, and the parameter count of every arm."""

    steps: int
    parameters: dict[str, int]
    runs: list[ArmRun]

    def values(self) -> dict[str, list[float]]:
        """Return the metric by arm, in the order of the seeds."""
        return {arm: [run.value for run in self.runs if run.arm == arm] for arm in self.parameters}


def ablate(
    config: RunConfig,
    *,
    arms: Iterable[str],
    seeds: int,
    callbacks: Callable[[], list[Callback]] = list,
) -> Ablation | None:
    """Train every arm with every seed, in `run.dir/run.name/ARM-seed-N`; finished runs are reused.

    Args:
        config: The config that all runs share.
        arms: The names of the arms.
        seeds: The number of seeds, from `run.seed` on.
        callbacks: Creates the callbacks of each run.

    Returns:
        The results, or None if a run was stopped; calling again resumes it.

    Raises:
        CheckpointError: If existing runs have other settings or data.
        RunError: If the metric of a run is not finite.
    """
    plans = [arm_config(config, arm, config.run.seed + n) for n in range(seeds) for arm in arms]
    for _, plan in plans:  # fail before hours of work if an existing run does not match
        if (plan.directory / CONFIG_FILE).is_file():
            check_existing_run(plan)
    runs, data_digest = [], None
    for number, (arm, plan) in enumerate(plans, start=1):
        directory = plan.directory
        log.info("ablate: run %d of %d: %s, seed %d", number, len(plans), arm, plan.run.seed)
        reused = is_finished(directory)
        if not reused and not train_or_resume(plan, callbacks()):
            return None
        digest = read_json(directory / PROVENANCE_FILE).get("data_sha256")
        if data_digest is not None and digest != data_digest:
            raise CheckpointError(f"{directory} was trained on different rows than the previous runs")
        data_digest = digest
        value = read_summary(directory)["final"].get(METRIC)
        if not isinstance(value, float) or not math.isfinite(value):
            raise RunError(f"{directory}: {METRIC} is {value}")
        runs.append(ArmRun(arm, plan.run.seed, str(directory), value, reused))
    parameters = {arm: _spec(plan).parameter_count() for arm, plan in plans}
    return Ablation(config.run.steps or 0, parameters, runs)


def arm_config(config: RunConfig, arm: str, seed: int) -> tuple[str, RunConfig]:
    """Return an arm with the config of its run; a dense arm has no router settings, all else is equal."""
    if not isinstance(config.model, Quality):
        raise ConfigError("whet ablate compares the arms of the quality task", hint="see docs/quality.md")
    if config.data.valid is None:
        raise ConfigError("whet ablate compares eval_loss, which needs data.valid")
    if config.data.held_out is not None:
        raise ConfigError(
            "whet ablate compares seeds on the same records, but a split by data.valid depends on the seed",
            hint="give data.valid a source of its own",
        )
    values = to_dict(config)
    values["model"]["arm"] = arm
    values["run"] |= {
        "seed": seed,
        "dir": str(config.directory),
        "name": f"{arm}-seed-{seed}",
    }
    if arm == "dense":
        values["optim"]["router_lr_scale"] = None
    groups = dict(values["optim"]["groups"])
    if config.model.arm == "dense":  # the config of a dense model cannot name a router
        groups.setdefault(ROUTER, {"lr_scale": 0.1})
    values["optim"]["groups"] = {}
    names = _parameter_names(validate_config(values))
    values["optim"]["groups"] = {
        pattern: group for pattern, group in groups.items() if any(re.search(pattern, n) for n in names)
    }
    return arm, validate_config(values)


def _parameter_names(plan: RunConfig) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in TabularModel(_spec(plan)).named_parameters()]


def _spec(plan: RunConfig) -> QualitySpec:
    assert isinstance(plan.model, Quality)
    return QualitySpec.from_config(plan.model)
