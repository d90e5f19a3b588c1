"""Which recipe runs which objective kind, by name: running one kind imports no other."""

from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.objectives import AnyObjective
from whet.config.sections import MixObjective, RunConfig
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.objectives.base import Objective
from whet.parallel.group import SOLO, World
from whet.training.objective_inputs import ObjectiveInputs
from whet.training.run_data import Needs

if TYPE_CHECKING:
    from whet.training.work import Work

RECIPES = {
    "sft": "whet.training.work:TextWork",
    "dpo": "whet.training.work:TextWork",
    "ipo": "whet.training.work:TextWork",
    "orpo": "whet.training.work:TextWork",
    "simpo": "whet.training.work:TextWork",
    "distill": "whet.training.work:TextWork",
    "mtp": "whet.training.work:TextWork",
    "distrust": "whet.training.work:TextWork",
    "mix": "whet.training.work:TextWork",
    "classify": "whet.training.kinds:ClassWork",
    "grpo": "whet.training.kinds:RewardWork",
    "regression": "whet.training.kinds:RowWork",
}
# of a config's own objective, or of one part of a mix: modules with `needs` and `build_objective`
OBJECTIVES = {
    "sft": "whet.training.objective_sft",
    "dpo": "whet.training.objective_preference",
    "ipo": "whet.training.objective_preference",
    "orpo": "whet.training.objective_preference",
    "simpo": "whet.training.objective_preference",
    "distill": "whet.training.objective_distill",
    "mtp": "whet.training.objective_mtp",
    "distrust": "whet.training.objective_distrust",
    "classify": "whet.training.classification",
    "grpo": "whet.training.reinforcement",
}
_WITHOUT_TEXTS = ("regression", "mix")  # rows of numbers, and several objectives on texts


def recipe_for(config: RunConfig, directory: Path, world: World = SOLO) -> "Work":
    """Return the recipe that runs a config."""
    recipe: Work = load_object(RECIPES[config.objective.kind])(config, directory, world)
    return recipe


def needs_of(section: AnyObjective | MixObjective) -> Needs:
    """Return what an objective reads from records."""
    if section.kind in _WITHOUT_TEXTS:
        return Needs()
    needs: Needs = load_object(f"{OBJECTIVES[section.kind]}:needs")(section)
    return needs


def build_objective(section: AnyObjective | MixObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective that a config, or one part of a mix, describes."""
    if section.kind in _WITHOUT_TEXTS:
        raise ConfigError(f"objective.kind {section.kind} is not an objective on texts of its own")
    objective: Objective = load_object(f"{OBJECTIVES[section.kind]}:build_objective")(section, inputs)
    return objective
