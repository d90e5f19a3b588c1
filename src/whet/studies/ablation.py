"""The arms of the quality task against each other: the same rows in the same order, for as many seeds."""

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from whet.config.load_config import make_config, to_dict
from whet.config.quality import ROUTER, Quality
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, RunError
from whet.recipes.quality.tabular_model import QualitySpec, TabularModel
from whet.run_directory import CONFIG_FILE, PROVENANCE_FILE, is_finished, summary_of
from whet.storage import read_json
from whet.studies.sweep import finish, refuse_other_plan
from whet.training.callbacks import Callback

log = logging.getLogger("whet")

METRIC = "eval_loss"


@dataclass(frozen=True)
class ArmRun:
    """One finished run."""

    arm: str
    seed: int
    directory: str
    value: float  # of METRIC, after the last step
    reused: bool  # it had finished before


@dataclass(frozen=True)
class Ablation:
    """All runs, and what each arm weighs."""

    steps: int
    parameters: dict[str, int]
    runs: list[ArmRun]

    def values(self) -> dict[str, list[float]]:
        """The metric of each arm, in the order of the seeds."""
        return {arm: [run.value for run in self.runs if run.arm == arm] for arm in self.parameters}


def ablate(
    config: RunConfig,
    *,
    arms: Iterable[str],
    seeds: int,
    callbacks: Callable[[], list[Callback]] = list,
) -> Ablation | None:
    """Train each arm with each seed, in `run.dir/run.name/ARM-seed-N`; finished runs are not run again.

    None: a run was stopped on its way, and the next call goes on with it.
    """
    plans = [arm_config(config, arm, config.run.seed + n) for n in range(seeds) for arm in arms]
    for _, plan in plans:  # before hours of work: what is there must belong to these
        if (plan.directory / CONFIG_FILE).is_file():
            refuse_other_plan(plan)
    runs, data = [], None
    for number, (arm, plan) in enumerate(plans, start=1):
        directory = plan.directory
        log.info("ablate: run %d of %d: %s, seed %d", number, len(plans), arm, plan.run.seed)
        reused = is_finished(directory)
        if not reused and not finish(plan, callbacks()):
            return None
        digest = read_json(directory / PROVENANCE_FILE).get("data_sha256")
        if data is not None and digest != data:
            raise CheckpointError(f"{directory} was trained on other rows than the runs before it")
        data = digest
        value = summary_of(directory)["final"].get(METRIC)
        if not isinstance(value, float) or not math.isfinite(value):
            raise RunError(f"{directory}: {METRIC} is {value}")
        runs.append(ArmRun(arm, plan.run.seed, str(directory), value, reused))
    weights = {arm: _spec(plan).parameter_count() for arm, plan in plans}
    return Ablation(config.run.steps or 0, weights, runs)


def arm_config(config: RunConfig, arm: str, seed: int) -> tuple[str, RunConfig]:
    """The run of one arm: all else is the same, but for a router's own rate, which a dense model has not."""
    if not isinstance(config.model, Quality):
        raise ConfigError("whet ablate compares the arms of the quality task", hint="see docs/quality.md")
    if config.data.valid is None:
        raise ConfigError("whet ablate compares eval_loss: it needs data.valid")
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
    if config.model.arm == "dense":  # its own config could not name a router
        groups.setdefault(ROUTER, {"lr_scale": 0.1})
    values["optim"]["groups"] = {}
    names = _parameter_names(make_config(values))
    values["optim"]["groups"] = {
        pattern: group for pattern, group in groups.items() if any(re.search(pattern, n) for n in names)
    }
    return arm, make_config(values)


def _parameter_names(plan: RunConfig) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in TabularModel(_spec(plan)).named_parameters()]


def _spec(plan: RunConfig) -> QualitySpec:
    assert isinstance(plan.model, Quality)
    return QualitySpec.from_config(plan.model)
